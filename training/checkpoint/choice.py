"""The checkpoint of a run that is used: by name, to resume, or after the weights were ruined."""

from collections.abc import Collection
from itertools import chain, count
from pathlib import Path

from data.files import is_present
from training.checkpoint.contents import STATE
from training.checkpoint.folders import (
    CHECKPOINTS,
    checkpoint_folder,
    checkpoints,
    forget_saved,
    last_saved,
    latest_checkpoint,
    step_of,
)
from training.checkpoint.reader import Checkpoint
from training.config import RunConfig
from training.distributed import Processes
from training.metrics import METRICS, read_metrics


def best_of(folders: Collection[Path]) -> Path | None:
    """The checkpoint with the lowest validation loss; None if no checkpoint has one."""
    losses = {f: loss for f in folders if (loss := Checkpoint.val_loss(f)) is not None}
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


def find_resume_checkpoint(
    config: RunConfig, processes: Processes
) -> tuple[Path | None, list[Path]]:
    """Return the checkpoint from which a run resumes, or None, and those set aside as damaged.

    Raises:
        ValueError: There is one, and run.resume=never, or none is whole; or there is none, and the
            run had saved one, so that its records would be lost.
        OSError: The folder of checkpoints cannot be read.
    """
    run = Path(config.out_dir)

    def find() -> tuple[Path | None, list[Path]]:
        newest = latest_checkpoint(run)
        if newest is None:
            _check_never_saved(run, config.save_every)
            forget_saved(run)
        if newest is None or config.resume == "auto":
            return newest, []
        if config.resume == "never":
            raise ValueError(
                f"run.out_dir={run} already has {newest.name} and run.resume=never: choose "
                "another folder, or run.resume=auto to resume from it"
            )
        whole = newest_whole(run)
        if whole is None:
            raise ValueError(
                f"run.resume=previous, and no checkpoint in {run} is whole: copy them again, or "
                "choose another run.out_dir to start again"
            )
        return whole, set_aside(run, whole)

    return processes.main_does(find)


def _check_never_saved(run: Path, save_every: int) -> None:
    """Refuse to start at step 0, which drops all records, where a checkpoint should be.

    A run that was killed before its first save has records, and may start again.
    """
    saved, records = last_saved(run), read_metrics(run)
    # Earlier versions left no name. But the second save waits until the first is on disk.
    steps = [record["step"] for record in records if "loss" in record]
    if saved is None and max(steps, default=0) > 2 * save_every:
        saved = f"some, with run.save_every={save_every}"
    if saved is not None and records:
        raise ValueError(
            f"{run / CHECKPOINTS} has no checkpoint, and this run saved {saved}: copy its "
            f"checkpoints back to resume. To start again at step 0, delete {run / METRICS}, which "
            f"has records up to step {records[-1]['step']}, or choose another run.out_dir"
        )


def newest_whole(run: Path) -> Path | None:
    """The newest checkpoint of a run of which every file is as it was written, or None."""
    return next(filter(Checkpoint.is_whole, reversed(checkpoints(run))), None)


def set_aside(run: Path, whole: Path) -> list[Path]:
    """Rename the checkpoints that are newer than `whole`, as damaged; returns their new names."""
    newer = checkpoints(run)
    newer = newer[newer.index(whole) + 1 :]
    return [folder.rename(_free_name(folder)) for folder in newer]


def _free_name(folder: Path) -> Path:
    """A name for a damaged checkpoint: another of that step may have been damaged before."""
    name = folder.with_name(f"damaged_{folder.name}")
    later = (name.with_name(f"{name.name}_{n}") for n in count(2))
    return next(path for path in chain([name], later) if not path.exists())


def last_good(run: Path, first_skipped: int) -> str:
    """Name the newest checkpoint from which a step was taken before the first skipped one.

    Weights may be ruined before a step is skipped: a later checkpoint may hold such weights.
    """
    there = checkpoints(run)
    good = [folder for folder in there if (step_of(folder) or 0) < first_skipped]
    if not good:
        return "there is no checkpoint with a good step after it"
    newest = f"{good[-1]} is the newest with a good step after it"
    if newer := [folder.name for folder in there[len(good) :]]:
        newest += f"; to resume from it, delete {', '.join(newer)}"
    return newest
