"""Training curriculum: examples of each step, first from its phases, then from the task itself."""

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
_GROUP = 4096  # samples whose augmentations are drawn at once


class ExampleSampler:
    """Visits all examples of a set in a new random order every epoch."""

    def __init__(self, size: int, key: Sequence[int]) -> None:
        """Create a sampler of `size` >= 1 examples; each key of non-negative integers gives another
        order."""
        self._size = size
        self._key = list(key)

    def examples(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Example number of each sample, (B,) int64 in [0, size).

        Samples, (B,) non-negative integers, count through all epochs.
        """
        epochs, indices = np.divmod(samples, self._size)
        examples = np.empty_like(indices)
        for epoch in np.unique(epochs).tolist():
            mask = epochs == epoch
            examples[mask] = Permutation(self._size, (*self._key, epoch))(indices[mask])
        return examples

    def changes(
        self, samples: npt.NDArray[np.int64], augment: Augment, shift: int
    ) -> npt.NDArray[np.int64]:
        """Random augmentation code of each sample, (B,), as `Examples.batch` takes it.

        It encodes rotation, reflection, and a shift by up to `shift` pixels.
        """
        changes = np.zeros_like(samples) if augment == "none" else self._draw(samples, DIHEDRAL)
        if augment == "mirror":
            changes &= _MIRROR
        if shift:
            changes += DIHEDRAL * self._draw(samples, (2 * shift + 1) ** 2, 1)
        return changes

    def _draw(
        self, samples: npt.NDArray[np.int64], below: int, *stream: int
    ) -> npt.NDArray[np.int64]:
        """Random numbers in [0, below), (B,), the same for the same sample."""
        groups, offsets = np.divmod(samples, _GROUP)
        numbers = np.empty_like(samples)
        for group in np.unique(groups).tolist():
            mask = groups == group
            drawn = np.random.default_rng([*self._key, group, *stream]).integers(below, size=_GROUP)
            numbers[mask] = drawn[offsets[mask]]
        return numbers


@dataclass(frozen=True)
class CurriculumStage:
    """Consecutive steps that draw an equal share of each batch from every set of examples."""

    first_step: int
    first_example: int
    """Number of examples in all earlier steps."""
    batch_size: int
    """Examples per step, over all processes."""
    sets: list[Examples]
    samplers: list[ExampleSampler]

    def batch(self, numbers: Tensor, changes: Tensor) -> Batch:
        """Assemble a batch from all sets; arguments are (sets, share), from `Curriculum.draw`."""
        parts = [examples.batch(numbers[i], changes[i]) for i, examples in enumerate(self.sets)]
        return parts[0] if len(parts) == 1 else _concatenate(parts)


class Curriculum:
    """Training examples of a run, in an order that is a pure function of seed and step."""

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
        """Load all sets of examples onto a device.

        Args:
            context_length: T, for phases that do not set their own.
            batch_size: Examples per step over all `world_size` processes, for phases that do not
                set their own. Each process takes an equal part.

        Raises:
            ValueError: The batch is not divisible among sets and processes, or a folder does not
                fit.
        """
        self._config = config
        self._rank, self._world_size = rank, world_size
        self.stages: list[CurriculumStage] = []
        """Stages in order; the last one is the task itself."""
        step, example = 0, 0

        @cache
        def load(path: str, length: int, zeros_share: float | None) -> Examples:
            return load_examples(Path(path), "train", length, config, device, zeros_share)

        task = Phase(paths=[config.path], steps=1)  # it lasts for all remaining steps
        for number, phase in enumerate([*config.phases, task]):
            length = phase.context_length or context_length
            size = phase.batch_size or batch_size
            if size % (len(phase.paths) * world_size):
                raise ValueError(
                    f"batch_size={size} must be a multiple of {len(phase.paths) * world_size} "
                    f"({len(phase.paths)} folder(s) x {world_size} GPU(s)): change "
                    "optim.batch_size, or the batch_size of the phase"
                )
            sets = [load(path, length, phase.zeros_share) for path in phase.paths]
            samplers = [
                ExampleSampler(len(examples), (seed, number, i)) for i, examples in enumerate(sets)
            ]
            self.stages.append(CurriculumStage(step, example, size, sets, samplers))
            step += phase.steps
            example += phase.steps * size

    @property
    def task(self) -> Examples:
        """Training examples of the task itself."""
        return self.stages[-1].sets[0]

    def number(self, step: int) -> int:
        """Index of the stage that a step belongs to."""
        return sum(stage.first_step <= step for stage in self.stages) - 1

    def examples_before(self, step: int) -> int:
        """Number of examples in all steps before `step`, over all processes."""
        stage = self.stages[self.number(step)]
        return stage.first_example + (step - stage.first_step) * stage.batch_size

    def draw(self, step: int) -> tuple[Tensor, Tensor]:
        """Draw example numbers and augmentation codes of this process for a step.

        Both are (sets, B / sets / world_size) int64 on the CPU, as `Examples.batch` takes them.
        """
        stage = self.stages[self.number(step)]
        share = stage.batch_size // len(stage.sets)
        local_share = share // self._world_size
        first = (step - stage.first_step) * share + self._rank * local_share
        samples = np.arange(first, first + local_share)
        numbers = np.stack([sampler.examples(samples) for sampler in stage.samplers])
        settings = self._config.augment, self._config.shift
        changes = np.stack([sampler.changes(samples, *settings) for sampler in stage.samplers])
        return torch.from_numpy(numbers), torch.from_numpy(changes)

    def check(self) -> None:
        """Raise ValueError if any image so far had more tokens than fit. Synchronizes."""
        if any(bool(examples.overflow) for stage in self.stages for examples in stage.sets):
            raise ValueError(
                "a training image has more pixels that are tokens than context_length, so some "
                "were dropped: raise the context_length of the model or of the phase"
            )


def _concatenate(parts: Sequence[Any]) -> Batch:
    tokens, lengths, positions, labels = zip(*parts, strict=True)
    # (T,) positions are common to all images
    shared = positions[0] is None or positions[0].dim() == 1
    return Batch(
        torch.cat(tokens),
        None if lengths[0] is None else torch.cat(lengths),
        positions[0] if shared else torch.cat(positions),
        torch.cat(labels),
    )
