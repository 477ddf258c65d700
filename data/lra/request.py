"""Arguments of `data.lra.tasks.prepare`, and the folder names that follow from them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from data.lra.listops import LONGEST, SHORTEST
from data.lra.store import SPLITS
from data.pathfinder.parameters import DIFFICULTIES

PATHFINDER_SIZES = {"pathfinder32": 32, "pathfinder64": 64, "pathx": 128, "pathfinder256": 256}
TASKS = ("listops", "text", "image", "retrieval", "pairs", "aclsum", *PATHFINDER_SIZES)

FEW_TOKENS = 8  # shorter formulas may have fewer distinct ones than requested


@dataclass(frozen=True, kw_only=True)
class Request:
    """Request to prepare a task."""

    task: str
    """A name in TASKS."""
    source: Path | None = None
    """Folder with the published files, or for aclsum a wheel; None downloads from the Hugging Face
    hub, or generates."""
    examples: Mapping[str, int] | None = None
    """Number of examples of "train", "val" and "test"; None for the benchmark's numbers."""
    seed: int = 0
    """Seed of the generated data and of the validation split."""
    contour_length: int = DIFFICULTIES["hard"]
    """Pathfinder only, see data/pathfinder/parameters.py."""
    distractors_of: int | None = None
    """Pathfinder only, see data/pathfinder/parameters.py."""
    shortest: int = SHORTEST
    """Minimum tokens of a generated ListOps formula."""
    longest: int = LONGEST
    """Maximum tokens of a generated ListOps formula."""
    n_threads: int | None = None
    """Threads that generate or read images; all cores by default."""

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
                f"examples={dict(self.examples)} must give a number for each of "
                f"{', '.join(SPLITS)}, at least 1."
            )
        contours = self.contour_length != DIFFICULTIES["hard"] or self.distractors_of is not None
        if contours and self.task not in PATHFINDER_SIZES:
            raise ValueError(
                f"{self.task} has no contours: leave out contour_length and distractors_of."
            )
        self._check_formulas()
        if self.source and self.distractors_of is not None:
            raise ValueError(
                f"distractors_of={self.distractors_of} was not released: leave out either this or "
                "the source."
            )

    def _check_formulas(self) -> None:
        if (self.shortest, self.longest) == (SHORTEST, LONGEST):
            return
        if self.task != "listops" or self.source:
            raise ValueError(
                f"shortest={self.shortest} and longest={self.longest} are for generated ListOps "
                "formulas: leave them out."
            )
        if not 4 <= self.shortest <= self.longest <= LONGEST or self.longest < FEW_TOKENS:
            raise ValueError(
                f"shortest={self.shortest} must be at least 4 (an operation on two digits), and at "
                f"most longest={self.longest}, which must be in {FEW_TOKENS}..{LONGEST}."
            )

    @property
    def name(self) -> str:
        """Name of the task's folder, with a suffix if it differs from the benchmark's."""
        if (self.shortest, self.longest) != (SHORTEST, LONGEST):
            return f"{self.task}-tokens{self.shortest}to{self.longest}"
        names = {length: name for name, length in DIFFICULTIES.items()}
        length, distractors = self.contour_length, self.distractors_of
        suffix = "" if names.get(length) == "hard" else f"-{names.get(length, f'length{length}')}"
        if distractors not in (None, length):
            suffix += f"-distractors{distractors}"
        return self.task + suffix


_NAME = re.compile(
    r"(?P<task>[a-z]+\d*)(-tokens(?P<shortest>\d+)to(?P<longest>\d+))?(-(?P<difficulty>[a-z]+))?"
    r"(-length(?P<contour_length>\d+))?(-distractors(?P<distractors_of>\d+))?"
)


def command_for(folder: Path) -> str:
    """Command that prepares a folder of this name; says TASK if the name is not of a task."""
    match = _NAME.fullmatch(folder.name)
    if match is None or match["task"] not in TASKS:
        words = ["TASK"]
    else:
        options = {name: value for name, value in match.groupdict().items() if value}
        words = [options.pop("task")]
        words += [f"--{name.replace('_', '-')} {value}" for name, value in options.items()]
        source = {"retrieval": "FOLDER", "aclsum": "WHEEL"}  # neither on the hub nor generated
        if words[0] in source:
            words += [f"--source {source[words[0]]}"]
    return " ".join(("python -m scripts.prepare_lra", *words, f"--out {folder.parent}"))
