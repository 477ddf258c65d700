"""Batches of a prepared task, assembled on the device from data that is already there.

Shapes: B examples, D documents of an example (1 or 2), T tokens.
"""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from data.lra.config import ExamplesConfig
from data.lra.pixels import DIHEDRAL, dihedral, pack_pixels, shifted, tile_order
from data.lra.store import DisplayLists, Images, Sequences, open_split, verify_split
from data.pathfinder.parameters import Pathfinder
from data.pathfinder.render import Renderer, pack
from data.randomness import fixed_chance


class Batch(NamedTuple):
    """Inputs of a classifier and their labels."""

    tokens: Tensor  # (B * D, T) integers
    lengths: Tensor | None  # (B * D,) int32, at least 1; None: no padding
    positions: Tensor | None  # (B * D, T) or (T,) int64, positions of the tokens; None: in order
    labels: Tensor  # (B,) int64


class Examples(ABC):
    """A split of a prepared task on a device."""

    def __init__(self, labels: np.ndarray, device: torch.device) -> None:
        self.labels = torch.from_numpy(labels.astype(np.int64)).to(device)  # (n,)
        self.overflow = torch.zeros((), dtype=torch.bool, device=device)
        """Whether any image so far had more pixels than fit into its tokens, so that some were
        dropped. The training loop checks it from time to time."""

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def batch(self, numbers: Tensor, changes: Tensor) -> Batch:
        """Assemble a batch on the device, without synchronization and with fixed shapes.

        The call can therefore be captured in a CUDA graph.

        Args:
            numbers: (B,) int64 example numbers in [0, n), on the device.
            changes: (B,) int64 augmentation of each image: a code of `dihedral` plus DIHEDRAL times
                a code of `shifted`. Texts ignore it.
        """


class SequenceExamples(Examples):
    """Texts, truncated or padded to T tokens."""

    def __init__(self, split: Sequences, context_length: int, device: torch.device) -> None:
        super().__init__(np.asarray(split.labels), device)
        # int16 is enough for every vocabulary here, at half the memory of int32
        self._tokens = torch.from_numpy(split.all_tokens().view(np.int16)).to(device)
        self._offsets = torch.from_numpy(np.array(split.offsets)).to(device)
        self._documents = split.manifest.documents_per_example
        self._columns = torch.arange(context_length, device=device)

    def batch(self, numbers: Tensor, changes: Tensor) -> Batch:
        documents = torch.arange(self._documents, device=numbers.device)
        sequences = (numbers[:, None] * self._documents + documents).flatten()
        start = self._offsets[sequences]
        lengths = (self._offsets[sequences + 1] - start).clamp(max=len(self._columns))
        index = (start[:, None] + self._columns).clamp(max=len(self._tokens) - 1)
        tokens = torch.where(self._columns < lengths[:, None], self._tokens[index], 0)
        return Batch(tokens, lengths.clamp(min=1).int(), None, self.labels[numbers])


class PixelExamples(Examples):
    """Images as sequences of pixels; the images are stored, or drawn from display lists."""

    def __init__(
        self,
        split: Images | DisplayLists,
        context_length: int,
        config: ExamplesConfig,
        device: torch.device,
        zeros_share: float | None = None,
    ) -> None:
        super().__init__(np.asarray(split.labels), device)
        self._shift = config.shift
        self._capacity = context_length
        self._min_level = config.min_level
        self._zeros_share = 0.0 if config.zeros == "padding" else zeros_share
        if isinstance(split, DisplayLists):
            parameters = Pathfinder(**split.manifest.source["parameters"])
            self.size = parameters.size
            self._rendering = Renderer(parameters, device), pack(split.display_lists, device)
        else:
            self.size = split.images.shape[-1]
            self._stored = torch.from_numpy(np.array(split.images)).to(device)
            self._rendering = None
        self._order = tile_order(self.size, device) if config.order == "tiles" else None
        if self._shift >= self.size:
            raise ValueError(
                f"data.shift={self._shift} must be below the image size of {self.size} x "
                f"{self.size} pixels. Try a few pixels."
            )

    def images(self, numbers: Tensor) -> Tensor:
        """Images by their numbers, (B, S, S) uint8."""
        if self._rendering is None:
            return self._stored[numbers]
        renderer, display_lists = self._rendering
        return renderer(display_lists[numbers])

    def batch(self, numbers: Tensor, changes: Tensor) -> Batch:
        images = dihedral(self.images(numbers), changes % DIHEDRAL)
        if self._shift:
            images = shifted(images, changes // DIHEDRAL, self._shift)
        pixels, labels = images.flatten(1), self.labels[numbers]
        if self._zeros_share is None:
            tokens = pixels if self._order is None else pixels[:, self._order]
            return Batch(tokens, None, self._order, labels)
        visible = pixels >= self._min_level
        if self._zeros_share:
            keys = changes * len(self) + numbers
            visible |= fixed_chance(keys, pixels.shape[1]) < self._zeros_share
        tokens, lengths, positions, overflow = pack_pixels(pixels, visible, self._capacity)
        self.overflow |= overflow
        return Batch(tokens, lengths, positions, labels)


def load_examples(
    folder: Path,
    split: str,
    context_length: int,
    config: ExamplesConfig,
    device: torch.device,
    zeros_share: float | None = None,
) -> SequenceExamples | PixelExamples:
    """Load a split (train, val or test) of a prepared task onto `device`.

    Args:
        context_length: T, tokens of each sequence in a batch.
        zeros_share: Fraction of the zero pixels that become tokens, see `Phase`.

    Raises:
        ValueError, FileNotFoundError: The folder does not hold this split, or does not fit
            `config`.
    """
    stored = open_split(folder, split)
    verify_split(folder, split)
    if isinstance(stored, Sequences):
        for name in ("zeros", "order", "augment", "shift"):
            if getattr(config, name) != getattr(ExamplesConfig, name):
                raise ValueError(
                    f"data.{name}={getattr(config, name)} is for images, but {folder} holds texts: "
                    "leave it out"
                )
        return SequenceExamples(stored, context_length, device)
    examples = PixelExamples(stored, context_length, config, device, zeros_share)
    if config.zeros == "tokens" and zeros_share is None and examples.size**2 != context_length:
        raise ValueError(
            f"model.context_length={context_length} must be {examples.size**2} for the images of "
            f"{examples.size} x {examples.size} pixels in {folder}. Set it, or data.zeros=padding."
        )
    return examples
