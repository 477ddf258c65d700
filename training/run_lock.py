"""One training at a time in the folder of a run: two would write over each other's files."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from data.files import lock_folder, remove_unfinished_files
from data.text.shards import MANIFEST
from training.checkpoint.folders import clear_unfinished
from training.config import RUN_CONFIG
from training.distributed import Processes
from training.metrics import METRICS


@contextmanager
def only_run(run: Path, processes: Processes) -> Iterator[None]:
    """Make the folder of a run and keep others from training in it. All processes call this.

    The main process holds the lock; the others learn from it whether to go on. What killed
    processes left unfinished is deleted. A new folder in which nothing was written is removed in
    the end, unless the process is killed.

    Raises:
        ValueError: it is being trained already, or cannot be a run's own.
        OSError: the folder can not be made or opened.
    """
    with ExitStack() as held:
        processes.main_does(lambda: _lock(run, held))
        yield


def check_folder(run: Path) -> None:
    """Refuse a folder that cannot be a run's own: it is written to, and checkpoints are deleted.

    Raises:
        ValueError: it is the current folder or one above it, a home, or prepared data.
    """
    # One of them alone may be another program's: a run overwrites config.yaml.
    if all((run / name).exists() for name in (RUN_CONFIG, METRICS)):
        return
    here, home, resolved = Path.cwd(), Path(os.path.expanduser("~")).resolve(), run.resolve()
    if resolved in (here, *here.parents, home, *home.parents):
        what = "is the current folder, a home folder, or one that holds them"
    elif (run / MANIFEST).exists():
        what = "holds prepared data"
    else:
        return
    raise ValueError(
        f"run.out_dir={run} {what}, and a run has a folder of its own: set run.out_dir=out/NAME"
    )


def _lock(run: Path, held: ExitStack) -> None:
    check_folder(run)
    is_new = not run.exists()
    run.mkdir(parents=True, exist_ok=True)
    held.enter_context(
        lock_folder(
            run,
            f"run.out_dir={run} is being trained by another process: wait for it, "
            "stop it, or choose another run.out_dir",
        )
    )
    remove_unfinished_files(run)
    clear_unfinished(run)
    if is_new:  # what refuses its configuration or its data leaves no trace
        held.callback(_remove_if_empty, run)


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):  # it is not empty, or somebody moved it
        folder.rmdir()
