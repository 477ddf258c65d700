"""Batches of a prepared task, made on the device from data that lies there.

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
    """What a classifier takes, and what it should answer."""

    tokens: Tensor  # (B * D, T) integers
    lengths: Tensor | None  # (B * D,) int32, at least 1; None: nothing is padding
    places: Tensor | None  # (B * D, T) or (T,) int64, where tokens stand; None: in order
    labels: Tensor  # (B,) int64


class Examples(ABC):
    """A split of a prepared task on a device."""

    def __init__(self, labels: np.ndarray, device: torch.device) -> None:
        self.labels = torch.from_numpy(labels.astype(np.int64)).to(device)  # (n,)
        self.overflow = torch.zeros((), dtype=torch.bool, device=device)
        """Whether an image so far had more pixels than tokens have room, so that some were lost.
        Whoever trains looks at it now and then."""

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def batch(self, numbers: Tensor, changes: Tensor) -> Batch:
        """Examples by their numbers, (B,) int64 in [0, n), on the device.

        `changes`, (B,) int64, are how images are turned and mirrored, a code of `dihedral`, and
        moved, DIHEDRAL times one of `shifted`; texts are left as they are.

        Nothing here waits for the device, and shapes do not vary: it may be captured in a graph.
        """


class SequenceExamples(Examples):
    """Texts, cut or padded to T tokens."""

    def __init__(self, split: Sequences, context_length: int, device: torch.device) -> None:
        super().__init__(np.asarray(split.labels), device)
        # int16 holds all vocabularies here, in half the memory of int32
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
    """Images, stored or drawn from display lists, as sequences of their pixels."""

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
        self._zeros_share = 0.0 if config.zeros == "padding" else zeros_share
        if isinstance(split, DisplayLists):
            parameters = Pathfinder(**split.manifest.source["parameters"])
            self.size = parameters.size
            self._drawn = Renderer(parameters, device), pack(split.display_lists, device)
        else:
            self.size = split.images.shape[-1]
            self._stored = torch.from_numpy(np.array(split.images)).to(device)
            self._drawn = None
        self._order = tile_order(self.size, device) if config.order == "tiles" else None
        if self._shift >= self.size:
            raise ValueError(
                f"data.shift={self._shift} pixels moves images of {self.size} x {self.size} out of "
                "themselves: choose a few"
            )

    def images(self, numbers: Tensor) -> Tensor:
        """(B, S, S) uint8 images by their numbers."""
        if self._drawn is None:
            return self._stored[numbers]
        renderer, display_lists = self._drawn
        return renderer(display_lists[numbers])

    def batch(self, numbers: Tensor, changes: Tensor) -> Batch:
        images = dihedral(self.images(numbers), changes % DIHEDRAL)
        if self._shift:
            images = shifted(images, changes // DIHEDRAL, self._shift)
        pixels, labels = images.flatten(1), self.labels[numbers]
        if self._zeros_share is None:
            tokens = pixels if self._order is None else pixels[:, self._order]
            return Batch(tokens, None, self._order, labels)
        shown = pixels > 0
        if self._zeros_share:
            keys = changes * len(self) + numbers
            shown |= fixed_chance(keys, pixels.shape[1]) < self._zeros_share
        tokens, lengths, places, overflow = pack_pixels(pixels, shown, self._capacity)
        self.overflow |= overflow
        return Batch(tokens, lengths, places, labels)


def load_examples(
    folder: Path,
    split: str,
    context_length: int,
    config: ExamplesConfig,
    device: torch.device,
    zeros_share: float | None = None,
) -> SequenceExamples | PixelExamples:
    """A split (train, val or test) of a prepared task, on `device`, in batches of T tokens.

    `zeros_share` of zero pixels are tokens, as in a `Phase`.

    Raises:
        ValueError, FileNotFoundError: the folder holds no such split, or not what `config` needs.
    """
    stored = open_split(folder, split)
    verify_split(folder, split)
    if isinstance(stored, Sequences):
        for name in ("zeros", "order", "augment", "shift"):
            if getattr(config, name) != getattr(ExamplesConfig, name):
                raise ValueError(
                    f"data.{name}={getattr(config, name)} is for images, and {folder} holds texts: "
                    "leave it out"
                )
        return SequenceExamples(stored, context_length, device)
    examples = PixelExamples(stored, context_length, config, device, zeros_share)
    if config.zeros == "tokens" and zeros_share is None and examples.size**2 != context_length:
        raise ValueError(
            f"{folder} holds images of {examples.size} x {examples.size} pixels, and "
            f"model.context_length={context_length}: set it to {examples.size**2}, or "
            "data.zeros=padding"
        )
    return examples
