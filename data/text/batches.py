"""Batches for language modelling from prepared token shards."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from data.sampler import WindowSampler
from data.text.shards import TokenStream

IGNORE = -100
"""Target of a padded position: `cross_entropy`'s default for positions without a loss."""


class Batch(NamedTuple):
    """B sequences of T tokens, on the CPU until somebody moves them."""

    tokens: torch.Tensor  # (B, T) int64
    targets: torch.Tensor  # (B, T) int64: the next tokens; IGNORE where none counts
    doc_start: torch.Tensor | None  # (B, T) int32: where in its row each token's document begins


class TrainBatches:
    """Training batches by sample number: any batch at any time, the same on any number of GPUs."""

    def __init__(
        self,
        stream: TokenStream,
        context_length: int,
        seed: int,
        *,
        document_mask: bool = False,
        consecutive_windows: int = 1,
    ) -> None:
        """Set up the order.

        Args:
            stream: The train split.
            context_length: Tokens a sequence.
            seed: Decides the order.
            document_mask: Whether batches say where documents start.
            consecutive_windows: Samples in a row that follow each other in the text.

        Raises:
            ValueError: The stream has fewer than context_length * consecutive_windows + 1 tokens.
        """
        self.stream = stream
        self.context_length = context_length
        self.consecutive_windows = consecutive_windows
        self.sampler = WindowSampler(len(stream), context_length * consecutive_windows, seed)
        self.document_mask = document_mask

    def batch(self, first_sample: int, batch_size: int) -> Batch:
        """The samples [first_sample, first_sample + batch_size); see `data.sampler.first_sample`.

        Returns:
            contiguous tensors on the CPU.
        """
        numbers = np.arange(first_sample, first_sample + batch_size)
        groups, parts = np.divmod(numbers, self.consecutive_windows)
        starts = self.sampler.position(groups) + parts * self.context_length
        length = self.context_length + 1
        windows = np.stack([self.stream.read(start, length) for start in starts.tolist()])
        doc_start = doc_starts(self.stream, starts, length - 1) if self.document_mask else None
        return Batch(_tensor(windows[:, :-1]), _tensor(windows[:, 1:]), doc_start)


class ValidationBatches:
    """The whole validation split once, in windows that do not overlap.

    All batches have the full shape, so that compiled code sees one shape: what is left over after
    the last token has targets `IGNORE`. Every rank gets the same number of batches, and over all
    ranks every token but the first is a target exactly once.
    """

    def __init__(
        self,
        stream: TokenStream,
        context_length: int,
        batch_size: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        document_mask: bool = False,
    ) -> None:
        """Divide the stream.

        Args:
            stream: The val split.
            context_length: Tokens a sequence.
            batch_size: Sequences a batch, on each rank.
            rank: This process, in [0, world_size).
            world_size: Processes that share the work.
            document_mask: Whether batches say where documents start.

        Raises:
            ValueError: The stream has no target, or an argument is out of range.
        """
        if min(context_length, batch_size) < 1:
            raise ValueError(
                f"context_length={context_length} and batch_size={batch_size} must be at least 1."
            )
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank} must lie in [0, world_size={world_size}).")
        if len(stream) < 2:
            raise ValueError(
                f"{stream.split} of {stream.path} has {len(stream)} token, but scoring needs at "
                "least 2; prepare a larger validation split."
            )
        self.stream = stream
        self.context_length = context_length
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.document_mask = document_mask
        self.n_targets = len(stream) - 1
        n_windows = -(-self.n_targets // context_length)
        self._n_batches = -(-n_windows // (batch_size * world_size))

    def __len__(self) -> int:
        """Batches of each rank."""
        return self._n_batches

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches on the CPU; targets hold `IGNORE` as padding."""
        for number in range(self._n_batches):
            first_window = (number * self.world_size + self.rank) * self.batch_size
            yield self._batch(first_window * self.context_length)

    def _batch(self, start: int) -> Batch:
        # consecutive windows are one range of the stream, so the padding is only at its end
        shape = (self.batch_size, self.context_length)
        inputs = np.zeros(self.batch_size * self.context_length, dtype=np.int64)
        targets = np.full_like(inputs, IGNORE)
        n_scored = min(len(inputs), self.n_targets - start)
        if n_scored > 0:
            ids = self.stream.read(start, n_scored + 1)
            inputs[:n_scored] = ids[:-1]
            targets[:n_scored] = ids[1:]
        doc_start = None
        if self.document_mask:
            starts = start + self.context_length * np.arange(self.batch_size)
            doc_start = doc_starts(self.stream, starts, self.context_length)
        return Batch(_tensor(inputs.reshape(shape)), _tensor(targets.reshape(shape)), doc_start)


def doc_starts(stream: TokenStream, starts: np.ndarray, length: int) -> torch.Tensor:
    """Where in its window each token's document begins, 0 if before the window.

    Args:
        stream: The split that the windows are cut from.
        starts: (B,) int64, where in the stream each window begins.
        length: T, tokens a window.

    Returns:
        (B, T) int32, on the CPU.
    """
    positions = starts[:, None] + np.arange(length)
    documents = np.searchsorted(stream.document_starts, positions, side="right") - 1
    begin = stream.document_starts[documents] - starts[:, None]
    return torch.from_numpy(np.maximum(begin, 0).astype(np.int32))


def _tensor(ids: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(ids))
