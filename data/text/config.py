"""What a language model is trained on."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What a language model is trained on."""

    path: str
    """Folder of the prepared text. `python -m scripts.prepare_text TEXT... --out PATH` makes it of
    text files."""
    document_mask: bool = False
    """Whether a token sees only those of its own document. Sequences are cut from one stream of
    tokens, so that most hold the ends and beginnings of several documents (packing)."""
    consecutive_windows: int = 1
    """Samples in a row that follow each other in the text. With 4, a context of 1K is trained on
    the tokens of a context of 4K, in their order, so that two such runs differ in nothing else."""

    def __post_init__(self) -> None:
        if self.consecutive_windows < 1:
            raise ValueError(
                f"data.consecutive_windows={self.consecutive_windows} must be at least 1."
            )
