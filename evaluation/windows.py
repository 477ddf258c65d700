"""Sliding windows that score a validation split.

A window reads `history` tokens and predicts the token after each of them. It scores only the last
`stride` predictions, so a scored token has between history - stride + 1 and history tokens before
it. The next window starts `stride` tokens later, and no token is scored twice.

stride == history is the evaluation of the FlashAttention paper (arXiv 2205.14135): chunks that do
not overlap, whose first tokens have almost no history. With a small stride, every scored token has
nearly the full history.

Position p of the stream is the target of the token at p - 1. Position 0 is never a target.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch

from data.text.batches import doc_starts
from data.text.shards import TokenStream

Control = Literal["none", "intact", "shuffle", "replace"]


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """One way to score a stream.

    Raises:
        ValueError: a field is out of range.
    """

    history: int
    """Tokens that a window reads."""
    stride: int
    """Tokens that a window scores, from 1 to history."""
    first: int = 0
    """Positions up to this one are not scored. At least history - stride, so that the first window
    is full. Two scorings score the same tokens if `first` is the same and the number of scored
    tokens is a multiple of the larger stride."""
    document_mask: bool = False
    """Whether tokens of earlier documents are masked."""
    control: Control = "none"
    """Change to the distant part of a window: everything except the scored tokens and the `near`
    tokens before them. intact: none. shuffle: permute the tokens. replace: take the text half a
    stream away, wrapping around at the end."""
    near: int = 0
    """For controls: number of tokens before the first scored one that are left intact."""

    def __post_init__(self) -> None:
        rest = self.history - self.stride
        if not 1 <= self.stride <= self.history:
            raise ValueError(
                f"history={self.history} must be at least 1, and stride={self.stride} must be "
                "between 1 and history."
            )
        if self.first < rest:
            raise ValueError(
                f"first={self.first} must be at least history - stride = {rest}: earlier windows "
                "are not full."
            )
        if self.control not in get_args(Control):
            raise ValueError(
                f"control={self.control!r} must be one of {', '.join(get_args(Control))}."
            )
        is_controlled = self.control != "none"
        if self.near and not is_controlled:
            raise ValueError(f"near={self.near} has no effect with control=none. Try near=0.")
        if is_controlled and not 0 <= self.near < rest:
            raise ValueError(
                f"near={self.near} with control={self.control} must be at least 0 and below "
                f"history - stride = {rest}, so that the window has a distant part."
            )
        if is_controlled and self.document_mask:
            raise ValueError(
                f"control={self.control} must not be combined with document_mask, because it "
                "moves text between documents. Try one of the two."
            )

    @property
    def name(self) -> str:
        """Short unique name of the scoring, for files and tables."""
        documents = "_documents" if self.document_mask else ""
        control = "" if self.control == "none" else f"_{self.control}{self.near}"
        return f"h{self.history}_s{self.stride}_f{self.first}{documents}{control}"

    def __str__(self) -> str:
        """Readable description, without `first` and `near`, which an evaluation shares."""
        if self.stride == self.history:
            words = f"chunks of {self.history:,} tokens"
        else:
            words = f"history {self.history:,}, stride {self.stride:,}"
        if self.document_mask:
            words += ", documents masked"
        if self.control == "none":
            return words
        change = {"intact": "intact", "shuffle": "shuffled", "replace": "replaced"}[self.control]
        return f"{words}, distant text {change}"

    def n_windows(self, n_tokens: int) -> int:
        """Number of windows in a stream of n_tokens. Tokens after the last are not scored."""
        return max(0, n_tokens - 1 - self.first) // self.stride

    def seen(self, n_tokens: int) -> np.ndarray:
        """(n_tokens,) int64: number of tokens that each target of a stream sees in its window.

        From history - stride + 1 to history, or 0 for tokens that are not scored.
        """
        index = np.arange(n_tokens) - 1 - self.first  # among the scored tokens
        is_scored = (index >= 0) & (index < self.n_windows(n_tokens) * self.stride)
        return np.where(is_scored, self.history - self.stride + 1 + index % self.stride, 0)


class ScoringBatch(NamedTuple):
    """Batch of windows of one shape, on the CPU."""

    tokens: torch.Tensor  # (B, history) int64
    targets: torch.Tensor  # (B, stride) int64: the token after each of the last `stride` tokens
    doc_start: torch.Tensor | None  # (B, history) int32
    positions: torch.Tensor  # (n, stride) int64: stream positions of the first n rows' targets


class ScoringWindows:
    """Iterate over one rank's shard of the windows of a stream, in batches of equal shape.

    The last batches are padded with repeated windows: only the first n rows count.

    Raises:
        ValueError: the stream is too short for a single window, or for replacement text outside the
            window.
    """

    def __init__(
        self,
        stream: TokenStream,
        scoring: Scoring,
        batch_size: int,
        *,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.n_windows = scoring.n_windows(len(stream))
        if self.n_windows == 0:
            raise ValueError(
                f"{stream.split} of {stream.path} has {len(stream)} tokens, and scoring with "
                f"history={scoring.history}, stride={scoring.stride}, first={scoring.first} needs "
                f"{scoring.first + scoring.stride + 1}. Try a longer text or a shorter history."
            )
        if scoring.control == "replace" and len(stream) < 2 * (scoring.history + 1):
            raise ValueError(
                f"{stream.split} of {stream.path} has {len(stream)} tokens, and control=replace "
                f"with history={scoring.history} needs {2 * (scoring.history + 1)}, so that the "
                "replacement is other text. Try a longer text or a shorter history."
            )
        self.stream, self.scoring, self.batch_size = stream, scoring, batch_size
        self.rank, self.world_size = rank, world_size

    def __len__(self) -> int:
        """Number of batches of each rank."""
        return -(-self.n_windows // (self.batch_size * self.world_size))

    def __iter__(self) -> Iterator[ScoringBatch]:
        """Yield the batches of this rank."""
        for number in range(len(self)):
            first = (number * self.world_size + self.rank) * self.batch_size
            windows = np.arange(first, first + self.batch_size)
            yield self._batch(windows, n=int((windows < self.n_windows).sum()))

    def _batch(self, windows: np.ndarray, n: int) -> ScoringBatch:
        scoring, history, stride = self.scoring, self.scoring.history, self.scoring.stride
        windows = np.minimum(windows, self.n_windows - 1)
        ends = scoring.first + (windows + 1) * stride  # of the input tokens
        starts = ends - history
        text = np.stack([self.stream.read(start, history + 1) for start in starts.tolist()])
        tokens, targets = text[:, :-1].copy(), text[:, -stride:].copy()
        if scoring.control in ("shuffle", "replace"):
            distant = history - stride + 1 - scoring.near
            for row, window, start in zip(tokens, windows.tolist(), starts.tolist(), strict=True):
                row[:distant] = self._change(row[:distant], window, start)
        positions = ends[:n, None] - stride + 1 + np.arange(stride)
        return ScoringBatch(
            torch.from_numpy(tokens),
            torch.from_numpy(targets),
            doc_starts(self.stream, starts, history) if scoring.document_mask else None,
            torch.from_numpy(positions),
        )

    def _change(self, distant: np.ndarray, window: int, start: int) -> np.ndarray:
        """Shuffle or replace the distant tokens of a window."""
        if self.scoring.control == "shuffle":
            return np.random.default_rng((0, window)).permutation(distant)  # one seed per window
        elsewhere = (start + len(self.stream) // 2) % len(self.stream)
        before_end = min(len(distant), len(self.stream) - elsewhere)
        rest = self.stream.read(0, len(distant) - before_end)
        return np.concatenate([self.stream.read(elsewhere, before_end), rest])
