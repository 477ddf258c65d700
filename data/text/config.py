"""What a language model is trained on."""

import math
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """One more corpus of a mixture."""

    path: str
    """Folder of the prepared text, made with the same tokenizer as data.path."""
    weight: float = 1.0
    """Its share of the samples, beside data.weight and the others'."""

    def __post_init__(self) -> None:
        _check_weight("data.mix[].weight", self.weight)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What a language model is trained on."""

    path: str
    """Folder of the prepared text. `python -m scripts.prepare_text TEXT... --out PATH` makes it of
    text files."""
    weight: float = 1.0
    """Where there is data.mix: data.path's share of the samples, beside the others' weights."""
    mix: list[Corpus] = field(default_factory=list)
    """More corpora, of which samples are drawn by weight: [{path: out/data/code, weight: 0.5}]. The
    validation loss stays that of data.path; each of theirs is recorded, too."""
    document_mask: bool = False
    """Whether a token sees only those of its own document. Sequences are cut from one stream of
    tokens, so that most hold the ends and beginnings of several documents (packing)."""
    consecutive_windows: int = 1
    """Samples in a row that follow each other in the text. With 4, a context of 1K is trained on
    the tokens of a context of 4K, in their order, so that two such runs differ in nothing else."""

    def __post_init__(self) -> None:
        _check_weight("data.weight", self.weight)
        if self.weight != 1.0 and not self.mix:
            raise ValueError(
                f"data.weight={self.weight} has no effect without data.mix: leave it out, or add "
                "corpora there."
            )
        paths = [self.path, *(corpus.path for corpus in self.mix)]
        if twice := {path for path in paths if paths.count(path) > 1}:
            raise ValueError(
                f"{' and '.join(sorted(twice))} is in data.path and data.mix more than once: give "
                "it one weight."
            )
        if self.consecutive_windows < 1:
            raise ValueError(
                f"data.consecutive_windows={self.consecutive_windows} must be at least 1."
            )


def _check_weight(name: str, weight: float) -> None:
    if not 0 < weight < math.inf:
        raise ValueError(f"{name}={weight} must be a finite number above 0.")
