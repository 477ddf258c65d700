"""Progress bar of an evaluation, with the time left."""

import sys
from collections.abc import Iterable, Iterator
from datetime import timedelta
from time import perf_counter
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Column

T = TypeVar("T")


class ScoringBar:
    """Progress bar over all scorings, and a line for each finished one.

    Without a terminal, only the lines are printed. Work is counted in tokens that models read.
    Every process has a bar, but only the main process prints.
    """

    def __init__(self, work: int, *, is_main: bool) -> None:
        self._is_main, self._done = is_main, 0
        self._console = Console(file=sys.stdout)
        self._bar = Progress(
            TaskProgressColumn(table_column=Column(no_wrap=True)),
            BarColumn(bar_width=20),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
            TextColumn("left"),
            TextColumn("{task.description}", table_column=Column()),  # wraps if necessary
            console=self._console,
            speed_estimate_period=3600,  # rich's 30 seconds are too short for slow models
            disable=not (is_main and self._console.is_terminal),
        )
        self._task = self._bar.add_task("", total=work)

    def __enter__(self) -> "ScoringBar":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def skip(self, work: int) -> None:
        """Remove work that was already scored from the total."""
        self._bar.update(self._task, total=(self._bar.tasks[0].total or 0) - work)

    def track(self, batches: Iterable[T], n_batches: int, title: str, work: int) -> Iterator[T]:
        """Yield the batches of one scoring and advance the bar after each."""
        self._bar.update(self._task, description=title)
        start = perf_counter()
        for batch in batches:
            yield batch
            self._bar.advance(self._task, work / n_batches)
        self._done += work
        self._bar.update(self._task, completed=self._done)
        if self._is_main:
            left = self._bar.tasks[0].time_remaining
            remaining = f", {timedelta(seconds=left)} left" if left else ""
            text = f"{title}: {perf_counter() - start:.1f} s{remaining}"
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)
