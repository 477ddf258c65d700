"""Data settings of language models."""

import math
from dataclasses import dataclass, field
from typing import Literal

Align = Literal["none", "document"]


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """An additional corpus of a mixture."""

    path: str
    """Folder of the prepared text, made with the same tokenizer as data.path."""
    weight: float = 1.0
    """Weight of its samples, relative to data.weight and the weights of the other corpora."""

    def __post_init__(self) -> None:
        _check_weight("data.mix[].weight", self.weight)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Data settings of a language model."""

    path: str
    """Folder of the prepared text. `python -m scripts.prepare_text TEXT... --out PATH` creates it
    from text files."""
    weight: float = 1.0
    """With data.mix: weight of data.path's samples, relative to the weights of the others."""
    mix: list[Corpus] = field(default_factory=list)
    """Additional corpora, sampled by weight: [{path: out/data/code, weight: 0.5}]. The validation
    loss is that of data.path; those of the other corpora are recorded separately."""
    document_mask: bool = False
    """Restrict attention to tokens of the same document. Sequences are cut from one stream of
    tokens, so most contain parts of several documents (packing)."""
    align: Align = "none"
    """Where training samples begin. document: where a document begins, so that each sample shows
    the start of its text; the rest of the document in which a sample ends is cut, and the start of
    a run reports how much that is. With model.context_schedule, each stage cuts samples of its own,
    so that a later one repeats text of an earlier one. none: anywhere, and nothing is cut."""
    consecutive_windows: int = 1
    """Number of consecutive samples that are adjacent in the text. With 4, a run with 1K context
    sees the same tokens in the same order as one with 4K context: only the context differs."""

    def __post_init__(self) -> None:
        _check_weight("data.weight", self.weight)
        if self.weight != 1.0 and not self.mix:
            raise ValueError(
                f"data.weight={self.weight} has no effect without data.mix: leave it out, or add "
                "corpora there."
            )
        paths = [self.path, *(corpus.path for corpus in self.mix)]
        if duplicates := {path for path in paths if paths.count(path) > 1}:
            raise ValueError(
                f"{' and '.join(sorted(duplicates))} is in data.path and data.mix more than once: "
                "give it one weight."
            )
        if self.align not in ("none", "document"):
            raise ValueError(f"data.align={self.align!r} must be none or document.")
        if self.consecutive_windows < 1:
            raise ValueError(
                f"data.consecutive_windows={self.consecutive_windows} must be at least 1."
            )


def _check_weight(name: str, weight: float) -> None:
    if not 0 < weight < math.inf:
        raise ValueError(f"{name}={weight} must be a finite number above 0.")
