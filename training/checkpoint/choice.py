"""Select a checkpoint of a run: by name, to resume, or the last one before weights were ruined."""

from collections.abc import Collection
from itertools import chain, count
from pathlib import Path

from data.files import is_present
from training.checkpoint.contents import STATE
from training.checkpoint.folders import (
    CHECKPOINTS,
    checkpoint_folder,
    checkpoints,
    clear_last_saved,
    last_saved,
    latest_checkpoint,
    step_of,
)
from training.checkpoint.reader import Checkpoint
from training.config import RunConfig
from training.distributed import Processes
from training.metrics import METRICS, read_metrics


def best_checkpoint(folders: Collection[Path]) -> Path | None:
    """Checkpoint with the lowest validation loss; None if no checkpoint has one."""
    losses = {f: loss for f in folders if (loss := Checkpoint.val_loss(f)) is not None}
    return min(losses, key=lambda folder: (losses[folder], folder), default=None)


def find_checkpoint(run: Path, choice: str | int | None = None) -> Path:
    """Find a checkpoint of a run by name.

    Args:
        choice: "best" for the lowest validation loss; a step; a folder name in the run's
            checkpoints, or a path; None for the newest.

    Raises:
        FileNotFoundError: there is no such run or checkpoint. The error names the checkpoints
            that exist.
    """
    existing = checkpoints(run)
    chosen = existing[-1] if existing else None
    if choice == "best":
        chosen = best_checkpoint(existing)
    elif choice is not None and str(choice).isdecimal():
        folder = checkpoint_folder(run, int(choice))
        chosen = folder if folder in existing else None
    elif choice is not None:
        folders = run / CHECKPOINTS / str(choice), Path(str(choice))
        chosen = next((folder for folder in folders if is_present(folder / STATE)), None)
    if chosen is not None:
        return chosen
    if not run.is_dir():
        raise FileNotFoundError(
            f"{run} must be the folder of a run, but there is no such folder. Pass the run.out_dir "
            "of a training"
        )
    if not existing:
        raise FileNotFoundError(f"{run} has no checkpoint yet. Train it first with train.py")
    names = ", ".join(folder.name for folder in existing)
    if choice == "best":
        raise FileNotFoundError(
            f"{run} has no checkpoint with a validation loss; only those saved at a multiple of "
            f"run.eval_every have one. Choose one of {names}"
        )
    raise FileNotFoundError(
        f"{run} has no checkpoint {choice}: it has {names}. Give a step, the folder of a "
        "checkpoint, or best"
    )


def find_resume_checkpoint(
    config: RunConfig, processes: Processes
) -> tuple[Path | None, list[Path]]:
    """Return the checkpoint from which a run resumes, or None, and the damaged ones it renamed.

    Raises:
        ValueError: There is one and run.resume=never; or run.resume=previous and none is intact; or
            there is none although the run saved one, so a fresh start would lose its records.
        OSError: The folder of checkpoints cannot be read.
    """
    run = Path(config.out_dir)

    def find() -> tuple[Path | None, list[Path]]:
        newest = latest_checkpoint(run)
        if newest is None:
            _check_never_saved(run, config.save_every)
            clear_last_saved(run)
        if newest is None or config.resume == "auto":
            return newest, []
        if config.resume == "never":
            raise ValueError(
                f"run.out_dir={run} already has {newest.name}, and run.resume=never. Choose "
                "another folder, or resume from it with run.resume=auto"
            )
        intact = newest_intact(run)
        if intact is None:
            raise ValueError(
                f"run.resume=previous needs an intact checkpoint, and {run} has none. Copy its "
                "checkpoints again, or choose another run.out_dir to start again"
            )
        return intact, rename_damaged(run, intact)

    return processes.run_on_main(find)


def _check_never_saved(run: Path, save_every: int) -> None:
    """Refuse to start at step 0, which drops all records, if the run has saved a checkpoint.

    A run that was killed before its first save has records but may start again.
    """
    saved, records = last_saved(run), read_metrics(run)
    # Earlier versions did not write last_saved. There, records beyond the second save show that the
    # first is on disk, because the second waits for it.
    steps = [record["step"] for record in records if "loss" in record]
    if saved is None and max(steps, default=0) > 2 * save_every:
        saved = f"some, with run.save_every={save_every}"
    if saved is not None and records:
        raise ValueError(
            f"{run / CHECKPOINTS} has no checkpoint, but this run saved {saved}. Copy its "
            f"checkpoints back to resume. To start again at step 0, delete {run / METRICS}, which "
            f"has records up to step {records[-1]['step']}, or choose another run.out_dir"
        )


def newest_intact(run: Path) -> Path | None:
    """Newest checkpoint of a run whose files are all undamaged, or None."""
    return next(filter(Checkpoint.is_intact, reversed(checkpoints(run))), None)


def rename_damaged(run: Path, intact: Path) -> list[Path]:
    """Rename the checkpoints newer than `intact` to damaged_...; returns their new paths."""
    newer = checkpoints(run)
    newer = newer[newer.index(intact) + 1 :]
    return [folder.rename(_free_name(folder)) for folder in newer]


def _free_name(folder: Path) -> Path:
    """Unused path for a damaged checkpoint; an earlier one of the same step may exist."""
    first = folder.with_name(f"damaged_{folder.name}")
    numbered = (first.with_name(f"{first.name}_{n}") for n in count(2))
    return next(path for path in chain([first], numbered) if not path.exists())


def good_checkpoint_hint(run: Path, first_skipped: int) -> str:
    """Sentence that names the newest checkpoint followed by a step before the first skipped one.

    Weights may be ruined before a step is skipped, so later checkpoints may contain ruined weights.
    """
    existing = checkpoints(run)
    good = [folder for folder in existing if (step_of(folder) or 0) < first_skipped]
    if not good:
        return "no usable checkpoint found"
    newest = f"{good[-1]} is the newest with a good step after it"
    if newer := [folder.name for folder in existing[len(good) :]]:
        newest += f"; to resume from it, delete {', '.join(newer)}"
    return newest
