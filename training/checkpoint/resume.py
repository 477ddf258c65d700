"""Which checkpoint a run goes on from."""

from itertools import chain, count
from pathlib import Path

from training.checkpoint.contents import is_whole
from training.checkpoint.folders import checkpoints, latest_checkpoint, step_of
from training.config import RunConfig
from training.distributed import Processes


def checkpoint_to_go_on_from(
    config: RunConfig, processes: Processes
) -> tuple[Path | None, list[Path]]:
    """The checkpoint that a run goes on from, if it has any; and those set aside as damaged.

    Raises:
        ValueError: There is one, and run.resume=never, or none is whole.
    """
    run = Path(config.out_dir)

    def find() -> tuple[Path | None, list[Path]]:
        newest = latest_checkpoint(run)
        if newest is None or config.resume == "auto":
            return newest, []
        if config.resume == "never":
            raise ValueError(
                f"run.out_dir={run} already has {newest.name} and run.resume=never: choose "
                "another folder, or run.resume=auto to go on from it"
            )
        whole = newest_whole(run)
        if whole is None:
            raise ValueError(
                f"run.resume=previous, and no checkpoint in {run} is whole: copy them again, or "
                "choose another run.out_dir to start anew"
            )
        return whole, set_aside(run, whole)

    return processes.main_does(find)


def newest_whole(run: Path) -> Path | None:
    """The newest checkpoint of a run of which every file is as it was written, or None."""
    return next((folder for folder in reversed(checkpoints(run)) if is_whole(folder)), None)


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
    """Says which checkpoint is the newest from which a step was taken before the first skipped."""
    good = [folder for folder in checkpoints(run) if (step_of(folder) or 0) < first_skipped]
    newest = f"{good[-1]} is the newest" if good else "there is no checkpoint"
    return f"{newest} with a good step after it"
