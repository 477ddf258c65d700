"""What can be asked of `data.lra.tasks.prepare`, and what its tasks share."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from data.lra.listops import LONGEST, SHORTEST
from data.lra.store import SPLITS
from data.lra.writer import TaskWriter
from data.pathfinder.parameters import DIFFICULTIES

PATHFINDER_SIZES = {"pathfinder32": 32, "pathfinder64": 64, "pathx": 128, "pathfinder256": 256}
TASKS = ("listops", "text", "image", "retrieval", "pairs", *PATHFINDER_SIZES)

OnProgress = Callable[[str, int, int], None]
"""Told the split, how many of its examples are done, and about how many there will be."""

Write = Callable[[TaskWriter, OnProgress], None]
"""Writes all splits of a task."""

FEW_TOKENS = 8
"""Among shorter formulas, there may be fewer different ones than are asked for."""

_TELL_EVERY = 1000
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to prepare."""

    task: str
    """A name in TASKS."""
    source: Path | None = None
    """Folder with the published files; None for the Hugging Face hub, or to generate."""
    examples: Mapping[str, int] | None = None
    """Examples of "train", "val" and "test"; None for the benchmark's."""
    seed: int = 0
    """Of what is generated, and of what is held out for validation."""
    contour_length: int = DIFFICULTIES["hard"]
    """Of Pathfinder, see data/pathfinder/parameters.py; so too the next."""
    distractors_of: int | None = None
    shortest: int = SHORTEST
    """Tokens of a generated formula of ListOps; so too the next."""
    longest: int = LONGEST
    n_threads: int | None = None
    """Threads that generate or read images, all cores by default."""

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ValueError(f"task={self.task!r} must be one of {', '.join(TASKS)}.")
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} must not be negative.")
        if self.n_threads is not None and self.n_threads < 1:
            raise ValueError(f"n_threads={self.n_threads} must be at least 1.")
        if self.examples is not None and (
            set(self.examples) != set(SPLITS) or min(self.examples.values()) < 1
        ):
            raise ValueError(
                f"examples={dict(self.examples)} must say for each of {', '.join(SPLITS)} how many "
                "there are, at least 1."
            )
        contours = self.contour_length != DIFFICULTIES["hard"] or self.distractors_of is not None
        if contours and self.task not in PATHFINDER_SIZES:
            raise ValueError(f"{self.task} has no contours: leave contour length and so on out.")
        self._check_formulas()
        if self.source and self.distractors_of is not None:
            raise ValueError(
                f"distractors_of={self.distractors_of} was not released: leave it out, or the "
                "source."
            )

    def _check_formulas(self) -> None:
        if (self.shortest, self.longest) == (SHORTEST, LONGEST):
            return
        if self.task != "listops" or self.source:
            raise ValueError(
                f"shortest={self.shortest} and longest={self.longest} are of formulas of ListOps "
                "that are generated: leave them out."
            )
        if not 4 <= self.shortest <= self.longest <= LONGEST or self.longest < FEW_TOKENS:
            raise ValueError(
                f"shortest={self.shortest} must be at least 4, an operation on two digits, and at "
                f"most longest={self.longest}, which must lie in {FEW_TOKENS}..{LONGEST}."
            )

    @property
    def name(self) -> str:
        """Of the task's folder: with a suffix where it is not the benchmark's."""
        if (self.shortest, self.longest) != (SHORTEST, LONGEST):
            return f"{self.task}-tokens{self.shortest}to{self.longest}"
        names = {length: name for name, length in DIFFICULTIES.items()}
        length, of = self.contour_length, self.distractors_of
        suffix = "" if names.get(length) == "hard" else f"-{names.get(length, f'length{length}')}"
        return self.task + suffix + ("" if of in (None, length) else f"-distractors{of}")


def example_numbers(
    benchmark: Mapping[str, int], sizes: Mapping[str, int]
) -> dict[str, list[range]]:
    """Which numbers of an endless series each split takes.

    The benchmark's splits take the first numbers, train before val before test. Where more
    training examples are asked for they follow after those of test: whatever the size, val and
    test are the same, and no example is in two splits.

    Args:
        benchmark: Examples of the benchmark's splits, in their order.
        sizes: Examples wanted of each.

    Raises:
        ValueError: val or test are to be larger than the benchmark's.
    """
    numbers, first, total = {}, 0, sum(benchmark.values())
    for split, there in benchmark.items():
        wanted = sizes[split]
        numbers[split] = [range(first, first + min(wanted, there))]
        if wanted > there:
            if split != "train":
                raise ValueError(f"examples: {split} cannot have {wanted:,}, at most {there:,}.")
            numbers[split].append(range(total, total + wanted - there))
        first += there
    return numbers


def origin_of(request: Request, dataset: str, hub_name: str | None = None) -> dict[str, Any]:
    """What the manifest says of data that are read."""
    return {
        "dataset": dataset,
        "from": hub_name if request.source is None else str(request.source),
        "examples": None if request.examples is None else dict(request.examples),
    }


def exactly(items: Iterator[_T], n: int, split: str) -> Iterator[_T]:
    """Yield the first n; raises ValueError where there are fewer."""
    found = 0
    for item in islice(items, n):
        found += 1
        yield item
    if found < n:
        raise ValueError(f"examples: {split} cannot have {n:,}, there are {found:,}.")


def counted(
    items: Iterable[_T],
    split: str,
    total: int,
    on_progress: OnProgress,
    size: Callable[[_T], int] = lambda item: 1,
) -> Iterator[_T]:
    done = 0
    on_progress(split, 0, total)
    for item in items:
        yield item
        done += size(item)
        if size(item) > 1 or done % _TELL_EVERY == 0:
            on_progress(split, done, total)
    on_progress(split, done, max(done, 1))
