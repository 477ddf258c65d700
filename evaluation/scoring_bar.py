"""How far an evaluation is, and how long it will take."""

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
    """A bar over all that is scored, and a line for each scoring; lines alone without a terminal.

    Work is counted in tokens that models read. All processes have one, and only the main one shows
    anything.
    """

    def __init__(self, work: int, *, is_main: bool) -> None:
        self._is_main, self._done = is_main, 0
        self._console = Console(file=sys.stdout)
        self._bar = Progress(
            TaskProgressColumn(table_column=Column(no_wrap=True)),
            BarColumn(bar_width=20),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
            TextColumn("left"),
            TextColumn("{task.description}", table_column=Column()),  # wraps where it must
            console=self._console,
            speed_estimate_period=3600,  # models may be slow, and rich forgets after 30 seconds
            disable=not (is_main and self._console.is_terminal),
        )
        self._task = self._bar.add_task("", total=work)

    def __enter__(self) -> "ScoringBar":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def known(self, work: int) -> None:
        """So much need not be done: it was scored before."""
        self._bar.update(self._task, total=(self._bar.tasks[0].total or 0) - work)

    def over(self, batches: Iterable[T], n_batches: int, title: str, work: int) -> Iterator[T]:
        """The batches of one scoring, which move the bar."""
        self._bar.update(self._task, description=title)
        began = perf_counter()
        for batch in batches:
            yield batch
            self._bar.advance(self._task, work / n_batches)
        self._done += work
        self._bar.update(self._task, completed=self._done)
        if self._is_main:
            left = self._bar.tasks[0].time_remaining
            until_end = f", {timedelta(seconds=left)} left" if left else ""
            text = f"{title}: {perf_counter() - began:.1f} s{until_end}"
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)
