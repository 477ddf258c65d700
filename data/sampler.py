"""Map sample numbers to tokens with a pure function of (seed, sample number); no order is stored.

A run resumes from a single number. The order does not depend on batch sizes or the number of GPUs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from data.randomness import key_stream, mix

_ROUNDS = 8
_MIN_HALF_BITS = 3
ROUND = 1 << 18  # numbers that a ShuffledRange shuffles at a time


class Permutation:
    """Keyed random permutation of range(n), n from 1 to 2^62, computed instead of stored.

    The key is a sequence of non-negative integers; each key gives its own permutation.

    A balanced Feistel network permutes the smallest range of 2^(2k) numbers that holds n. A number
    that lands outside range(n) is sent through the network again until it lands inside. This cycle
    walking takes at most 4 rounds on average, and the result is still a bijection. See Black and
    Rogaway, "Ciphers with Arbitrary Finite Domains", 2002.
    """

    def __init__(self, n: int, key: Sequence[int]) -> None:
        if not 1 <= n <= 1 << 62:
            raise ValueError(f"n={n} must be between 1 and 2^62.")
        half_bits = max(_MIN_HALF_BITS, ((n - 1).bit_length() + 1) // 2)
        self.n = n
        self._shift = np.uint64(half_bits)
        self._mask = np.uint64((1 << half_bits) - 1)
        self._round_keys = key_stream(key, _ROUNDS)

    def __call__(self, index: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Permute indices of any shape in [0, n); returns int64 of the same shape in [0, n)."""
        indices = np.asarray(index, dtype=np.int64)
        if indices.size and (indices.min() < 0 or indices.max() >= self.n):
            raise IndexError(
                f"index must be in [0, {self.n}), but ranges from {indices.min()} to "
                f"{indices.max()}."
            )
        out = self._network(indices.astype(np.uint64).reshape(-1))
        # cycle walking: only the numbers outside range(n) go through the network again
        while (outside := np.flatnonzero(out >= self.n)).size:
            out[outside] = self._network(out[outside])
        return out.astype(np.int64).reshape(indices.shape)

    def _network(self, x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        left, right = x >> self._shift, x & self._mask
        for round_key in self._round_keys:
            left, right = right, left ^ (mix(right ^ round_key) & self._mask)
        return (left << self._shift) | right


@dataclass(eq=False)
class WindowSampler:
    """Cuts a token stream into windows and visits them in a new random order every epoch.

    A window is `context_length + 1` tokens: the inputs, and the targets shifted by one. Within an
    epoch, no two windows share a target. Every epoch cuts at another offset, so the window borders
    move. Each epoch therefore skips fewer than `2 * context_length` tokens at the ends of the
    stream.

    Raises:
        ValueError: The stream is too short for one window, or an argument is out of range.
    """

    n_tokens: int
    context_length: int
    seed: int
    """Non-negative; determines the order of all epochs."""

    def __post_init__(self) -> None:
        length, n_targets = self.context_length, self.n_tokens - 1
        _check_sampler(length, self.seed)
        if n_targets < length:
            raise ValueError(
                f"The corpus has {self.n_tokens} tokens, but one sample of context_length={length} "
                f"needs {length + 1}; use a longer text or a shorter context."
            )
        # one window fewer than would fit, so that the borders can move by up to a whole window
        self.windows_per_epoch = max(1, n_targets // length - 1)
        self._n_offsets = min(length, n_targets - self.windows_per_epoch * length + 1)

    def position(self, sample_numbers: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Stream position at which each sample's window starts, int64.

        Sample numbers are non-negative, of any shape, and count through all epochs.
        """
        epochs, positions = _visited_windows(sample_numbers, self.windows_per_epoch, self.seed)
        positions *= self.context_length
        for epoch in np.unique(epochs).tolist():
            positions[epochs == epoch] += self.epoch_offset(epoch)
        return positions

    def epoch_offset(self, epoch: int) -> int:
        """Stream position of the epoch's first window, in [0, context_length)."""
        return int(key_stream((self.seed, epoch, 1), 1)[0]) % self._n_offsets


@dataclass(eq=False)
class DocumentSampler:
    """Cuts windows that begin where a document begins, and visits them as `WindowSampler` does.

    A window is `context_length + 1` tokens and may hold several documents. The next window begins
    with the first document after it, so the rest of the document in which a window ends is cut. The
    windows are the same in every epoch.

    Raises:
        ValueError: No document begins early enough for a window, or an argument is out of range.
    """

    document_starts: npt.NDArray[np.int64]
    """Stream position of the start of each document, ascending from 0."""
    n_tokens: int
    context_length: int
    seed: int

    def __post_init__(self) -> None:
        _check_sampler(self.context_length, self.seed)
        starts, length = self.document_starts, self.context_length
        following = np.searchsorted(starts, starts + length).tolist()  # document after the window
        n_usable = int(np.searchsorted(starts, self.n_tokens - length))
        documents, document = [], 0
        while document < n_usable:
            documents.append(document)
            document = following[document]
        if not documents:
            raise ValueError(
                f"The corpus has {self.n_tokens} tokens, but one sample of context_length={length} "
                f"needs {length + 1}; use a longer text or a shorter context."
            )
        self._starts = starts[documents]
        self.windows_per_epoch = len(documents)

    @property
    def cut_tokens(self) -> int:
        """Number of tokens that no window has."""
        return self.n_tokens - 1 - self.windows_per_epoch * self.context_length

    def position(self, sample_numbers: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Stream position at which each sample's window starts, as in `WindowSampler`."""
        _, windows = _visited_windows(sample_numbers, self.windows_per_epoch, self.seed)
        return self._starts[windows]


def _check_sampler(context_length: int, seed: int) -> None:
    if context_length < 1:
        raise ValueError(f"context_length={context_length} must be at least 1.")
    if seed < 0:
        raise ValueError(f"seed={seed} must not be negative.")


def _visited_windows(
    sample_numbers: npt.ArrayLike, n_windows: int, seed: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Epoch of each sample and its window in [0, n_windows): int64, shaped like the numbers."""
    numbers = np.asarray(sample_numbers, dtype=np.int64)
    if numbers.size and numbers.min() < 0:
        raise IndexError(f"sample numbers must not be negative, but one is {numbers.min()}.")
    epochs, indices = np.divmod(numbers, n_windows)
    windows = np.empty_like(numbers)
    for epoch in np.unique(epochs).tolist():
        mask = epochs == epoch
        windows[mask] = Permutation(n_windows, (seed, epoch))(indices[mask])
    return epochs, windows


@dataclass(frozen=True)
class ShuffledRange:
    """Random order of the numbers in [first, last), in rounds of at most `ROUND` numbers.

    A stage of a run visits the short windows of a range of long windows in such an order: adjacent
    windows are then steps apart, and the next stage still finds the text that is left of the epoch.
    Rounds also end with epochs, so that no text of the next epoch comes before the end of this one.
    """

    first: int
    last: int
    seed: int
    epoch: int
    """Numbers in an epoch, the first of which begins at 0."""

    def __call__(self, plain: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Permute int64 numbers in [first, last)."""
        starts = plain - plain % self.epoch % ROUND
        numbers = np.empty_like(plain)
        for start in np.unique(starts).tolist():
            mask = starts == start
            end_of_epoch = (start // self.epoch + 1) * self.epoch
            begin, end = max(start, self.first), min(start + ROUND, end_of_epoch, self.last)
            order = Permutation(end - begin, (self.seed, begin, 3))
            numbers[mask] = begin + order(plain[mask] - begin)
        return numbers


def first_sample(
    *,
    start: int,
    micro_step: int,
    rank: int,
    grad_accum_steps: int,
    world_size: int,
    micro_batch_size: int,
) -> int:
    """Number of the first sample in one rank's micro-batch of consecutive samples.

    A step covers the same block of numbers, from `start` on, however they are divided into ranks
    and micro-steps.
    """
    if not (0 <= micro_step < grad_accum_steps and 0 <= rank < world_size and start >= 0):
        raise ValueError(
            f"start={start}, micro_step={micro_step}, rank={rank} must be non-negative and below "
            f"grad_accum_steps={grad_accum_steps} and world_size={world_size}."
        )
    return start + (micro_step * world_size + rank) * micro_batch_size
