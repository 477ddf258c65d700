"""A run that is told to end: all processes learn of it between the same two steps."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Self, TypeVar

import torch
import torch.distributed as dist

from training.distributed import Processes
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
