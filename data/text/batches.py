"""Batches for language modelling from prepared token shards."""

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

import numpy as np
import torch

from data.sampler import WindowSampler
from data.text.shards import TokenStream

IGNORE = -100  # target of a padded position: `cross_entropy`'s default for positions without a loss


class Batch(NamedTuple):
    """B sequences of T tokens, on the CPU until somebody moves them."""

    tokens: torch.Tensor  # (B, T) int64
    targets: torch.Tensor  # (B, T) int64: the next tokens; IGNORE where none counts
    doc_start: torch.Tensor | None  # (B, T) int32: where in its row each token's document begins


@dataclass(eq=False)
class TrainBatches:
    """Training batches by sample number: any batch at any time, the same on any number of GPUs.

    Raises:
        ValueError: The stream has fewer than context_length * consecutive_windows + 1 tokens.
    """

    stream: TokenStream
    context_length: int
    seed: int
    _: KW_ONLY
    document_mask: bool = False
    """Whether batches say where documents start."""
    consecutive_windows: int = 1
    """Samples in a row that follow each other in the text."""

    def __post_init__(self) -> None:
        group_length = self.context_length * self.consecutive_windows
        self.sampler = WindowSampler(len(self.stream), group_length, self.seed)

    def batch(self, first_sample: int, batch_size: int) -> Batch:
        """Samples [first_sample, first_sample + batch_size) as contiguous tensors."""
        return self.samples(np.arange(first_sample, first_sample + batch_size))

    def samples(self, numbers: np.ndarray) -> Batch:
        """Any samples by their numbers, int64 (B,), as contiguous tensors."""
        groups, parts = np.divmod(numbers, self.consecutive_windows)
        starts = self.sampler.position(groups) + parts * self.context_length
        length = self.context_length
        read = [self.stream.read(start, length + 1) for start in starts.tolist()]
        windows = torch.from_numpy(np.stack(read))
        doc_start = doc_starts(self.stream, starts, length) if self.document_mask else None
        return Batch(windows[:, :-1].contiguous(), windows[:, 1:].contiguous(), doc_start)


@dataclass(eq=False)
class ValidationBatches:
    """The whole validation split once, in windows that do not overlap.

    All batches have the full shape, so that compiled code sees one shape: what is left over after
    the last token has targets `IGNORE`. Every rank gets the same number of batches, and over all
    ranks every token but the first is a target exactly once.

    Raises:
        ValueError: The stream has no target, or an argument is out of range.
    """

    stream: TokenStream
    context_length: int
    batch_size: int
    """Sequences a batch, on each rank."""
    _: KW_ONLY
    rank: int = 0
    """This process, in [0, world_size)."""
    world_size: int = 1
    document_mask: bool = False
    """Whether batches say where documents start."""

    def __post_init__(self) -> None:
        if min(self.context_length, self.batch_size) < 1:
            raise ValueError(
                f"context_length={self.context_length} and batch_size={self.batch_size} must be at "
                "least 1."
            )
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank={self.rank} must lie in [0, world_size={self.world_size}).")
        if len(self.stream) < 2:
            raise ValueError(
                f"{self.stream.split} of {self.stream.path} has {len(self.stream)} token, but "
                "scoring needs at least 2; prepare a larger validation split."
            )

    def __len__(self) -> int:
        """Batches of each rank."""
        n_targets = len(self.stream) - 1
        return -(-n_targets // (self.context_length * self.batch_size * self.world_size))

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches on the CPU; targets hold `IGNORE` as padding."""
        for number in range(len(self)):
            inputs = torch.zeros(self.batch_size, self.context_length, dtype=torch.int64)
            targets = torch.full_like(inputs, IGNORE)
            # consecutive windows are one range of the stream, so the padding is only at its end
            start = (number * self.world_size + self.rank) * inputs.numel()
            n_scored = min(inputs.numel(), len(self.stream) - 1 - start)
            if n_scored > 0:
                ids = torch.from_numpy(self.stream.read(start, n_scored + 1))
                inputs.view(-1)[:n_scored] = ids[:-1]
                targets.view(-1)[:n_scored] = ids[1:]
            doc_start = None
            if self.document_mask:
                starts = start + self.context_length * np.arange(self.batch_size)
                doc_start = doc_starts(self.stream, starts, self.context_length)
            yield Batch(inputs, targets, doc_start)


def doc_starts(stream: TokenStream, starts: np.ndarray, length: int) -> torch.Tensor:
    """Where in its window each token's document begins, 0 if before the window.

    Windows of T = `length` tokens that begin at `starts`, int64 (B,), in the stream give int32
    (B, T), on the CPU.
    """
    positions = starts[:, None] + np.arange(length)
    documents = np.searchsorted(stream.document_starts, positions, side="right") - 1
    begin = stream.document_starts[documents] - starts[:, None]
    return torch.from_numpy(np.maximum(begin, 0).astype(np.int32))
