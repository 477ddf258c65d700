"""Batches for language modelling, read from prepared token shards."""

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch

from data.sampler import DocumentSampler, ShuffledRange, WindowSampler
from data.text.config import Align
from data.text.shards import TokenStream

IGNORE = -100  # target of a padded position, the default `ignore_index` of `cross_entropy`


class Batch(NamedTuple):
    """B sequences of T tokens, created on the CPU."""

    tokens: torch.Tensor  # (B, T) int64
    targets: torch.Tensor  # (B, T) int64: next tokens; IGNORE at positions without a loss
    doc_start: torch.Tensor | None  # (B, T) int32: column at which each token's document begins


@dataclass(eq=False)
class TrainBatches:
    """Training batches by sample number, in random access and independent of the number of GPUs.

    Raises:
        ValueError: The stream has fewer than context_length * consecutive_windows + 1 tokens.
    """

    stream: TokenStream
    context_length: int
    seed: int
    _: KW_ONLY
    document_mask: bool = False
    """Whether batches contain `doc_start`."""
    consecutive_windows: int = 1
    """Number of consecutive samples that are adjacent in the text."""
    align: Align = "none"
    """Whether the first of consecutive samples begins where a document begins."""

    def __post_init__(self) -> None:
        n_tokens, length = len(self.stream), self.context_length * self.consecutive_windows
        self.sampler: WindowSampler | DocumentSampler
        if self.align == "document":
            starts = self.stream.document_starts
            self.sampler = DocumentSampler(starts, n_tokens, length, self.seed)
        else:
            self.sampler = WindowSampler(n_tokens, length, self.seed)

    @property
    def samples_per_epoch(self) -> int:
        """Number of samples of one pass over the text."""
        return self.sampler.windows_per_epoch * self.consecutive_windows

    @property
    def cut_share(self) -> float:
        """Share of the tokens that no sample has, because it begins with a document."""
        if not isinstance(self.sampler, DocumentSampler):
            return 0.0
        return self.sampler.cut_tokens / len(self.stream)

    def batch(self, first_sample: int, batch_size: int) -> Batch:
        """Read samples [first_sample, first_sample + batch_size) as contiguous tensors."""
        return self.samples(np.arange(first_sample, first_sample + batch_size))

    def samples(self, numbers: np.ndarray) -> Batch:
        """Read samples by number, int64 (B,), as contiguous tensors."""
        groups, parts = np.divmod(numbers, self.consecutive_windows)
        starts = self.sampler.position(groups) + parts * self.context_length
        length = self.context_length
        rows = [self.stream.read(start, length + 1) for start in starts.tolist()]
        windows = torch.from_numpy(np.stack(rows))
        doc_start = doc_starts(self.stream, starts, length) if self.document_mask else None
        return Batch(windows[:, :-1].contiguous(), windows[:, 1:].contiguous(), doc_start)


class Samples(Protocol):
    """Training samples in random access: of one corpus or of a mixture."""

    def samples(self, numbers: np.ndarray) -> Batch:
        """Read samples by number, int64 (B,), as contiguous tensors."""
        ...


@dataclass(eq=False)
class ShuffledBatches:
    """Training batches of samples in another order."""

    source: Samples
    order: ShuffledRange

    def batch(self, first_sample: int, batch_size: int) -> Batch:
        """Read the samples at [first_sample, first_sample + batch_size) in the order."""
        numbers = np.arange(first_sample, first_sample + batch_size)
        return self.source.samples(self.order(numbers))


@dataclass(eq=False)
class ValidationBatches:
    """Batches that cover the whole validation split once, in windows that do not overlap.

    All batches have the full shape, so compiled code sees one shape; positions after the last token
    have target `IGNORE`. Every rank gets the same number of batches. Over all ranks, every token
    except the first is a target exactly once.

    Raises:
        ValueError: The stream has no target, or an argument is out of range.
    """

    stream: TokenStream
    context_length: int
    batch_size: int
    """Sequences per batch and rank."""
    _: KW_ONLY
    rank: int = 0
    """Rank of this process, in [0, world_size)."""
    world_size: int = 1
    document_mask: bool = False
    """Whether batches contain `doc_start`."""

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
        """Number of batches per rank."""
        n_targets = len(self.stream) - 1
        return -(-n_targets // (self.context_length * self.batch_size * self.world_size))

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches on the CPU; padded targets are `IGNORE`."""
        for number in range(len(self)):
            inputs = torch.zeros(self.batch_size, self.context_length, dtype=torch.int64)
            targets = torch.full_like(inputs, IGNORE)
            # The windows of a batch are one contiguous range, so only its end is padded.
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
    """Column at which each token's document begins, (B, T) int32 on the CPU; at least 0.

    Args:
        starts: Stream positions of the windows, int64 (B,).
        length: T, tokens of each window.
    """
    positions = starts[:, None] + np.arange(length)
    documents = np.searchsorted(stream.document_starts, positions, side="right") - 1
    begin = stream.document_starts[documents] - starts[:, None]
    return torch.from_numpy(np.maximum(begin, 0).astype(np.int32))
