"""Windows that score a validation split: which tokens are targets, and how much history each has.

A window reads `history` tokens and scores the last `stride` of the tokens that follow them, so a
scored token has between history - stride + 1 and history tokens before it. The next window stands
`stride` further on, and no token is scored twice. With stride == history that is the evaluation of
the FlashAttention paper (arXiv 2205.14135): chunks that do not overlap, whose first tokens have
next to no history. A small stride gives every token nearly all of the history.

Position p of the stream is the target of the token at p - 1; position 0 is never one.
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
    """How a stream is scored.

    Raises:
        ValueError: a field outside its range.
    """

    history: int
    """Tokens that a window reads."""
    stride: int
    """Tokens that a window scores, from 1 to history."""
    first: int = 0
    """Positions up to this one are not scored; at least history - stride, so that the first window
    is full. Scorings are of the same tokens where `first` is the same and a multiple of the larger
    stride is scored."""
    document_mask: bool = False
    """Whether a token sees nothing before its document."""
    control: Control = "none"
    """What is done to the distant part of a window, all but the scored tokens and `near` before
    them: intact, nothing; shuffle, another order; replace, the text half a stream away, the end of
    the stream followed by its beginning."""
    near: int = 0
    """With a control: how many tokens before the first scored one stay as they are."""

    def __post_init__(self) -> None:
        rest = self.history - self.stride
        if not 1 <= self.stride <= self.history:
            raise ValueError(
                f"history={self.history} and stride={self.stride}: history must be at least 1 and "
                "stride lie between 1 and history."
            )
        if self.first < rest:
            raise ValueError(
                f"first={self.first} must be at least history - stride = {rest}: before that a "
                "window is not full."
            )
        if self.control not in get_args(Control):
            raise ValueError(
                f"control={self.control!r} must be one of {', '.join(get_args(Control))}."
            )
        is_controlled = self.control != "none"
        if self.near and not is_controlled:
            raise ValueError(f"near={self.near} has no effect with control=none: leave it out.")
        if is_controlled and not 0 <= self.near < rest:
            raise ValueError(
                f"near={self.near} with control={self.control} must be at least 0 and below "
                f"history - stride = {rest}: nothing distant is left."
            )
        if is_controlled and self.document_mask:
            raise ValueError(
                f"control={self.control} with document_mask: the text that it moves has other "
                "documents. Take one of them."
            )

    @property
    def name(self) -> str:
        """Short and the same for equal scorings, for files and tables."""
        documents = "_documents" if self.document_mask else ""
        control = "" if self.control == "none" else f"_{self.control}{self.near}"
        return f"h{self.history}_s{self.stride}_f{self.first}{documents}{control}"

    def __str__(self) -> str:
        """For people, without what all scorings of an evaluation share: `first` and `near`."""
        if self.stride == self.history:
            words = f"chunks of {self.history:,} tokens"
        else:
            words = f"history {self.history:,}, stride {self.stride:,}"
        if self.document_mask:
            words += ", documents masked"
        if self.control == "none":
            return words
        done = {"intact": "as it is", "shuffle": "shuffled", "replace": "replaced"}[self.control]
        return f"{words}, distant text {done}"

    def n_windows(self, n_tokens: int) -> int:
        """Windows in a stream of n_tokens; what is left over after the last is not scored."""
        return max(0, n_tokens - 1 - self.first) // self.stride

    def seen(self, n_tokens: int) -> np.ndarray:
        """(n_tokens,) int64: how many tokens the window shows before each target of a stream.

        From history - stride + 1 to history; 0 where nothing is scored.
        """
        place = np.arange(n_tokens) - 1 - self.first  # among all that are scored
        is_scored = (place >= 0) & (place < self.n_windows(n_tokens) * self.stride)
        return np.where(is_scored, self.history - self.stride + 1 + place % self.stride, 0)


class ScoringBatch(NamedTuple):
    """Windows of one shape, on the CPU."""

    tokens: torch.Tensor  # (B, history) int64
    targets: torch.Tensor  # (B, stride) int64: what follows the last `stride` tokens
    doc_start: torch.Tensor | None  # (B, history) int32
    positions: torch.Tensor  # (n, stride) int64: where the targets of the first n rows stand


class ScoringWindows:
    """One rank's share of the windows of a stream, in batches of equal shape.

    The last batches repeat windows where there are no more: only the first n rows count.

    Raises:
        ValueError: the stream is too short for a single window, or for other text than the
            window's own.
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
                f"{scoring.first + scoring.stride + 1}: take a longer text or a shorter history."
            )
        if scoring.control == "replace" and len(stream) < 2 * (scoring.history + 1):
            raise ValueError(
                f"{stream.split} of {stream.path} has {len(stream)} tokens, and control=replace "
                f"with history={scoring.history} needs {2 * (scoring.history + 1)}, so that what "
                "replaces a window is not its own text: take a longer text or a shorter history."
            )
        self.stream, self.scoring, self.batch_size = stream, scoring, batch_size
        self.rank, self.world_size = rank, world_size

    def __len__(self) -> int:
        """Batches of each rank."""
        return -(-self.n_windows // (self.batch_size * self.world_size))

    def __iter__(self) -> Iterator[ScoringBatch]:
        """Yield this rank's batches."""
        for number in range(len(self)):
            first = (number * self.world_size + self.rank) * self.batch_size
            windows = np.arange(first, first + self.batch_size)
            yield self._batch(windows, n=int((windows < self.n_windows).sum()))

    def _batch(self, windows: np.ndarray, n: int) -> ScoringBatch:
        scoring, history, stride = self.scoring, self.scoring.history, self.scoring.stride
        windows = np.minimum(windows, self.n_windows - 1)
        ends = scoring.first + (windows + 1) * stride  # of the tokens that are read
        starts = ends - history
        text = np.stack([self.stream.read(start, history + 1) for start in starts.tolist()])
        tokens, targets = text[:, :-1].copy(), text[:, -stride:].copy()
        if scoring.control in ("shuffle", "replace"):
            distant = history - stride + 1 - scoring.near
            for row, window, start in zip(tokens, windows.tolist(), starts.tolist(), strict=True):
                row[:distant] = self._altered(row[:distant], window, start)
        positions = ends[:n, None] - stride + 1 + np.arange(stride)
        return ScoringBatch(
            torch.from_numpy(tokens),
            torch.from_numpy(targets),
            doc_starts(self.stream, starts, history) if scoring.document_mask else None,
            torch.from_numpy(positions),
        )

    def _altered(self, distant: np.ndarray, window: int, start: int) -> np.ndarray:
        if self.scoring.control == "shuffle":
            return np.random.default_rng((0, window)).permutation(distant)  # each its own order
        elsewhere = (start + len(self.stream) // 2) % len(self.stream)
        before_end = min(len(distant), len(self.stream) - elsewhere)
        rest = self.stream.read(0, len(distant) - before_end)
        return np.concatenate([self.stream.read(elsewhere, before_end), rest])
