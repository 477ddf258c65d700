"""Stop a run between two steps on all processes, and lock its folder against a second run."""

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
from training.signals import deferred_signals

T = TypeVar("T")


class Stopped(Exception):  # noqa: N818
    """Raised by all processes at the same step after one of them received a signal."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.number = number


class Stop:
    """Polls for signals after `watch` was called; before that, a signal ends the process at once.

    All processes call the same methods in the same order. A signal that one of them received is
    known to all at the second `look`. They exchange it on the CPU, in the background, and never
    wait for the GPU.
    """

    def __init__(self, processes: Processes) -> None:
        """Start without deferring signals; see `watch`."""
        self._processes = processes
        self._signal: Callable[[], int | None] | None = None
        self._exchange: tuple[dist.Work, torch.Tensor] | None = None
        self._stack = ExitStack()

    def watch(self) -> None:
        """Defer signals from now on, because there is something to save."""
        if self._signal is None:
            self._signal = self._stack.enter_context(deferred_signals())

    def look(self) -> None:
        """Check whether a process received a signal.

        Raises:
            Stopped: One of them did.
        """
        if self._signal is None:
            return
        number = self._signal() or 0
        if self._processes.world_size > 1:
            previous, largest = self._exchange, torch.tensor(number)
            group = self._processes.host_group
            work = dist.all_reduce(largest, dist.ReduceOp.MAX, group=group, async_op=True)
            assert work is not None
            self._exchange, number = (work, largest), 0
            if previous is not None:
                previous[0].wait()
                number = int(previous[1])
        if number:
            raise Stopped(number)

    def between(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the items, and `look` after each; every process must have the same number.

        Raises:
            Stopped: A process received a signal.
        """
        for item in items:
            yield item
            self.look()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


@contextmanager
def lock_run_dir(run: Path, processes: Processes) -> Iterator[None]:
    """Create the folder of a run and lock it while it is trained. All processes call this.

    The main process holds the lock; the others learn from it whether to continue. Unfinished files
    of killed processes are deleted. If nothing was written into a new folder, it is removed at the
    end, unless the process is killed.

    Raises:
        ValueError: another process is training there, or the folder cannot belong to a run.
        OSError: the folder cannot be created or opened.
    """
    with ExitStack() as stack:
        processes.run_on_main(lambda: _lock(run, stack))
        yield


def check_folder(run: Path) -> None:
    """Refuse a folder that cannot belong to a run, as runs overwrite files and delete checkpoints.

    Raises:
        ValueError: it is the current folder or a parent of it, a home folder, or prepared data.
    """
    # With both files it is a run. A single one may belong to another program.
    if all((run / name).exists() for name in (RUN_CONFIG, METRICS)):
        return
    cwd, home, resolved = Path.cwd(), Path(os.path.expanduser("~")).resolve(), run.resolve()
    if resolved in (cwd, *cwd.parents, home, *home.parents):
        problem = "is the current folder, a home folder, or a parent of one"
    elif (run / MANIFEST).exists():
        problem = "contains prepared data"
    else:
        return
    raise ValueError(
        f"run.out_dir={run} {problem}; a run needs its own folder. Try run.out_dir=out/NAME"
    )


def _lock(run: Path, stack: ExitStack) -> None:
    check_folder(run)
    is_new = not run.exists()
    run.mkdir(parents=True, exist_ok=True)
    stack.enter_context(
        lock_folder(
            run,
            f"run.out_dir={run} is in use by another training process. Wait for it, stop it, or "
            "choose another run.out_dir",
        )
    )
    remove_unfinished_files(run)
    clear_unfinished(run)
    if is_new:  # a run that is refused for its configuration or data leaves no folder behind
        stack.callback(_remove_if_empty, run)


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):  # not empty, or moved by the user
        folder.rmdir()
