"""Ending a run between two steps on all processes, and locking its folder against a second run."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Self, TypeVar

import torch
import torch.distributed as dist

from data.files import lock_folder, remove_unfinished_files
from data.text.shards import MANIFEST
from training.checkpoint.folders import clear_unfinished
from training.config import RUN_CONFIG
from training.distributed import Processes
from training.metrics import METRICS
from training.signals import stops_noted

T = TypeVar("T")


class Stopped(Exception):  # noqa: N818
    """Some process got a signal; all raise this at the same place."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.number = number


class Stop:
    """Looks for a signal to end, once asked to `watch`; until then one ends the process at once.

    All processes call the same methods in the same order. What one of them got is known to all at
    the second look: they exchange it on the CPU, in the background, and never wait for the GPU.
    """

    def __init__(self, processes: Processes) -> None:
        """Nothing is watched yet."""
        self._processes = processes
        self._noted: Callable[[], int | None] | None = None
        self._exchange: tuple[dist.Work, torch.Tensor] | None = None
        self._held = ExitStack()

    def watch(self) -> None:
        """From now on there is something to save: signals are noted."""
        if self._noted is None:
            self._noted = self._held.enter_context(stops_noted())

    def look(self) -> None:
        """Look whether to end.

        Raises:
            Stopped: A process was told to.
        """
        if self._noted is None:
            return
        number = self._noted() or 0
        if self._processes.world_size > 1:
            before, here = self._exchange, torch.tensor(number)
            group = self._processes.host_group
            work = dist.all_reduce(here, dist.ReduceOp.MAX, group=group, async_op=True)
            assert work is not None
            self._exchange, number = (work, here), 0
            if before is not None:
                before[0].wait()
                number = int(before[1])
        if number:
            raise Stopped(number)

    def between(self, items: Iterable[T]) -> Iterator[T]:
        """The items, as many on every process, with a look after each.

        Raises:
            Stopped: A process was told to end.
        """
        for item in items:
            yield item
            self.look()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()


@contextmanager
def lock_run_dir(run: Path, processes: Processes) -> Iterator[None]:
    """Make the folder of a run and keep others from training in it. All processes call this.

    The main process holds the lock; the others learn from it whether to continue. What killed
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
