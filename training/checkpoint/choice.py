"""Which checkpoint of a run somebody asks for."""

from collections.abc import Collection
from pathlib import Path

from data.files import is_present
from training.checkpoint.contents import STATE, val_loss_of
from training.checkpoint.folders import CHECKPOINTS, checkpoint_folder, checkpoints


def best_of(folders: Collection[Path]) -> Path | None:
    """The checkpoint with the lowest validation loss; None if no checkpoint has one."""
    losses = {folder: loss for folder in folders if (loss := val_loss_of(folder)) is not None}
    return min(losses, key=lambda folder: (losses[folder], folder), default=None)


def chosen_checkpoint(run: Path, choice: str | int | None = None) -> Path:
    """The checkpoint of a run by name.

    Args:
        choice: "best" for the lowest validation loss; a step; a folder, by its name in the run's
            checkpoints or by its path; None for the newest.

    Raises:
        FileNotFoundError: there is no such checkpoint. The error names those that exist.
    """
    there = checkpoints(run)
    found = there[-1] if there else None
    if choice == "best":
        found = best_of(there)
    elif choice is not None and str(choice).isdecimal():
        folder = checkpoint_folder(run, int(choice))
        found = folder if folder in there else None
    elif choice is not None:
        folders = run / CHECKPOINTS / str(choice), Path(str(choice))
        found = next((folder for folder in folders if is_present(folder / STATE)), None)
    if found is not None:
        return found
    if not there:
        raise FileNotFoundError(f"{run} has no checkpoint yet: train it first, with train.py")
    names = ", ".join(folder.name for folder in there)
    if choice == "best":
        raise FileNotFoundError(
            f"{run} has no checkpoint with a validation loss, which those have that are saved at a "
            f"multiple of run.eval_every: choose one of {names}"
        )
    raise FileNotFoundError(
        f"{run} has no checkpoint {choice}: it has {names}. Give a step, the folder of a "
        "checkpoint, or best"
    )
