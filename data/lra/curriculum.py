"""What each step is trained on: the phases of a curriculum, then the task itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from data.lra.batches import Batch, Examples, load_examples
from data.lra.config import Augment, ExamplesConfig, Phase
from data.lra.pixels import DIHEDRAL
from data.sampler import Permutation

_MIRROR = 2  # the code of `dihedral` that swaps left and right
_GROUP = 4096  # samples whose changes are drawn at once


class ExampleSampler:
    """Visits all examples of a set in a new random order every epoch."""

    def __init__(self, size: int, key: Sequence[int]) -> None:
        """Choose the order of `size` examples, at least 1; every key of non-negative integers gives
        another."""
        self._size = size
        self._key = list(key)

    def examples(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Which example each sample is, (B,) int64 in [0, size).

        Samples, (B,) integers >= 0, are counted on over all epochs.
        """
        epochs, indices = np.divmod(samples, self._size)
        examples = np.empty_like(indices)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            examples[here] = Permutation(self._size, (*self._key, epoch))(indices[here])
        return examples

    def changes(
        self, samples: npt.NDArray[np.int64], augment: Augment, shift: int
    ) -> npt.NDArray[np.int64]:
        """(B,) random codes of how each sample is turned, mirrored and moved by up to `shift`
        pixels, as `Examples.batch` takes them."""
        changes = np.zeros_like(samples) if augment == "none" else self._draw(samples, DIHEDRAL)
        if augment == "mirror":
            changes &= _MIRROR
        if shift:
            changes += DIHEDRAL * self._draw(samples, (2 * shift + 1) ** 2, 1)
        return changes

    def _draw(
        self, samples: npt.NDArray[np.int64], below: int, *stream: int
    ) -> npt.NDArray[np.int64]:
        """(B,) random numbers in [0, below), the same for the same sample."""
        groups, places = np.divmod(samples, _GROUP)
        found = np.empty_like(samples)
        for group in np.unique(groups).tolist():
            here = groups == group
            drawn = np.random.default_rng([*self._key, group, *stream]).integers(below, size=_GROUP)
            found[here] = drawn[places[here]]
        return found


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
        """Load all sets onto a device.

        A phase without a context length, T, or a batch size, over all processes, has these. Each
        of `world_size` processes takes an equal part.

        Raises:
            ValueError: the batch cannot be shared equally, or a folder does not fit.
        """
        self._config = config
        self._rank, self._world_size = rank, world_size
        self.lessons: list[Lesson] = []
        """The last is the task itself."""
        step, example = 0, 0

        @cache
        def load(path: str, room: int, zeros_share: float | None) -> Examples:
            return load_examples(Path(path), "train", room, config, device, zeros_share)

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
            sets = [load(path, room, phase.zeros_share) for path in phase.paths]
            samplers = [
                ExampleSampler(len(examples), (seed, number, i)) for i, examples in enumerate(sets)
            ]
            self.lessons.append(Lesson(step, example, size, sets, samplers))
            step += phase.steps
            example += phase.steps * size

    @property
    def task(self) -> Examples:
        """The training examples of the task itself."""
        return self.lessons[-1].sets[0]

    def number(self, step: int) -> int:
        """Which of the lessons a step belongs to."""
        return sum(lesson.first_step <= step for lesson in self.lessons) - 1

    def examples_before(self, step: int) -> int:
        """Examples of all steps before `step`, over all processes."""
        lesson = self.lessons[self.number(step)]
        return lesson.first_example + (step - lesson.first_step) * lesson.batch_size

    def draw(self, step: int) -> tuple[Tensor, Tensor]:
        """The examples of this process in a step, and how their images are changed: both (sets,
        B / sets / world_size) int64 on the CPU, as `Examples.batch` takes them."""
        lesson = self.lessons[self.number(step)]
        share = lesson.batch_size // len(lesson.sets)
        here = share // self._world_size
        first = (step - lesson.first_step) * share + self._rank * here
        samples = np.arange(first, first + here)
        numbers = np.stack([sampler.examples(samples) for sampler in lesson.samplers])
        how = self._config.augment, self._config.shift
        changes = np.stack([sampler.changes(samples, *how) for sampler in lesson.samplers])
        return torch.from_numpy(numbers), torch.from_numpy(changes)

    def check(self) -> None:
        """Raise ValueError if images so far had more pixels than tokens have room. Waits."""
        if any(bool(examples.overflow) for lesson in self.lessons for examples in lesson.sets):
            raise ValueError(
                "a training image has more pixels that are tokens than context_length has room "
                "for, so that some were lost: raise that of the model, or of the phase"
            )


def _joined(parts: Sequence[Any]) -> Batch:
    tokens, lengths, places, labels = zip(*parts, strict=True)
    # (T,) places are those of every image
    alike = places[0] is None or places[0].dim() == 1
    return Batch(
        torch.cat(tokens),
        None if lengths[0] is None else torch.cat(lengths),
        places[0] if alike else torch.cat(places),
        torch.cat(labels),
    )
