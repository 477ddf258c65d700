"""What each step is trained on: the phases of a curriculum, then the task itself."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from data.lra.batches import Batch, Examples, load_examples
from data.lra.config import ExamplesConfig, Phase
from data.lra.order import ExampleSampler
from data.lra.pixels import DIHEDRAL

_MIRROR = 2  # the code of `dihedral` that swaps left and right


@dataclass(frozen=True)
class Lesson:
    """Sets of examples that take equal shares of each batch, from some step on."""

    first_step: int
    first_example: int
    """Examples of all steps before."""
    batch_size: int
    """Examples of a step, over all processes."""
    sets: list[Examples]
    samplers: list[ExampleSampler]

    def batch(self, numbers: Tensor, changes: Tensor) -> Batch:
        """A batch of all sets, for (sets, share) numbers and changes from `Curriculum.draw`."""
        parts = [examples.batch(numbers[i], changes[i]) for i, examples in enumerate(self.sets)]
        return parts[0] if len(parts) == 1 else _joined(parts)


class Curriculum:
    """The training examples of a run, in an order that is a pure function of seed and step."""

    def __init__(
        self,
        config: ExamplesConfig,
        context_length: int,
        batch_size: int,
        *,
        seed: int,
        rank: int,
        world_size: int,
        device: torch.device,
    ) -> None:
        """Load all sets.

        Args:
            config: names the folders.
            context_length: T.
            batch_size: examples of a step, over all processes; a phase may have another.
            seed: of the order and of the changes.
            rank, world_size: this process and how many there are: each takes an equal part.
            device: where batches are wanted.

        Raises:
            ValueError: the batch cannot be shared equally, or a folder does not fit.
        """
        self._config = config
        self._rank, self._world_size = rank, world_size
        self._lessons: list[Lesson] = []
        loaded: dict[tuple[str, int, float | None], Examples] = {}
        step, example = 0, 0
        task = Phase(paths=[config.path], steps=1)  # of as many as are left
        for number, phase in enumerate([*config.phases, task]):
            room = phase.context_length or context_length
            size = phase.batch_size or batch_size
            if size % (len(phase.paths) * world_size):
                raise ValueError(
                    f"a batch of {size} examples must be a multiple of {len(phase.paths)} "
                    f"folder(s) * {world_size} GPU(s), which share it equally: change "
                    "optim.batch_size, or that of the phase"
                )
            zeros = phase.zeros_share
            for path in phase.paths:
                if (path, room, zeros) not in loaded:
                    loaded[path, room, zeros] = load_examples(
                        Path(path), "train", room, config, device, zeros
                    )
            sets = [loaded[path, room, zeros] for path in phase.paths]
            samplers = [
                ExampleSampler(len(examples), (seed, number, i)) for i, examples in enumerate(sets)
            ]
            self._lessons.append(Lesson(step, example, size, sets, samplers))
            step += phase.steps
            example += phase.steps * size
        self._sets = list(loaded.values())

    @property
    def task(self) -> Examples:
        """The training examples of the task itself."""
        return self._lessons[-1].sets[0]

    def number(self, step: int) -> int:
        """Which lesson a step belongs to."""
        return sum(lesson.first_step <= step for lesson in self._lessons) - 1

    def lesson(self, number: int) -> Lesson:
        """A lesson by its number; the last is the task itself."""
        return self._lessons[number]

    def examples_before(self, step: int) -> int:
        """Examples of all steps before `step`, over all processes."""
        lesson = self._lessons[self.number(step)]
        return lesson.first_example + (step - lesson.first_step) * lesson.batch_size

    def draw(self, step: int) -> tuple[Tensor, Tensor]:
        """The examples of this process in a step, and how their images are changed.

        Returns:
            (sets, B / sets / world_size) int64 numbers, and changes as `Examples.batch` takes
            them, on the CPU.
        """
        lesson = self._lessons[self.number(step)]
        share = lesson.batch_size // len(lesson.sets)
        here = share // self._world_size
        first = (step - lesson.first_step) * share + self._rank * here
        samples = np.arange(first, first + here)
        numbers = np.stack([sampler.examples(samples) for sampler in lesson.samplers])
        changes = np.zeros_like(numbers)
        if self._config.augment != "none":
            changes = np.stack([sampler.changes(samples) for sampler in lesson.samplers])
        if self._config.augment == "mirror":
            changes &= _MIRROR
        if most := self._config.shift:
            shifts = np.stack([sampler.shifts(samples, most) for sampler in lesson.samplers])
            changes = changes + DIHEDRAL * shifts
        return torch.from_numpy(numbers), torch.from_numpy(changes)

    def check(self) -> None:
        """Raise ValueError if images so far had more pixels than tokens have room. Waits."""
        if any(bool(examples.overflow) for examples in self._sets):
            raise ValueError(
                "a training image has more pixels that are tokens than context_length has room "
                "for, so that some were lost: raise that of the model, or of the phase"
            )


def _joined(parts: list[Batch]) -> Batch:
    lengths = [part.lengths for part in parts]
    places = [part.places for part in parts]
    return Batch(
        torch.cat([part.tokens for part in parts]),
        torch.cat([x for x in lengths if x is not None]) if lengths[0] is not None else None,
        _joined_places([x for x in places if x is not None]),
        torch.cat([part.labels for part in parts]),
    )


def _joined_places(places: list[Tensor]) -> Tensor | None:
    if not places:
        return None
    return places[0] if places[0].dim() == 1 else torch.cat(places)
