"""Configuration of the classifier of sequences and images."""

import math
from dataclasses import dataclass
from typing import Literal

from kernels.limits import MAX_VOCAB_SIZE
from model.block_config import MAX_CONTEXT, BlockConfig
from model.checks import check_positive


@dataclass(frozen=True, kw_only=True)
class ClassifierConfig(BlockConfig):
    """A bidirectional encoder with a pooled head; the defaults are the Transformer of Table 3.

    It has two layers of width 64 with two heads: the model of Xiong et al. 2021 (Nystromformer,
    arXiv 2102.03902), which the FlashAttention paper uses for Long Range Arena (appendix E.3).

    Raises:
        ValueError: a field is invalid, or two fields contradict each other.
    """

    vocab_size: int
    """Number of token ids: at least that of the data."""
    n_classes: int
    """Number of labels: that of the data."""
    context_length: int
    """Tokens in an example, including padding: at least those of the longest image. Longer texts
    are truncated."""
    n_layer: int = 2
    n_head: int = 2
    n_embd: int = 64
    n_inner: int = 128
    """Width of the MLP between its two layers."""
    tokens: Literal["symbols", "intensities"] = "symbols"
    """symbols: embeddings start unrelated. intensities: embeddings of near values start close
    together, for pixels of an image."""
    grid_width: int | None = None
    """Pixels in a row of a square image; null for text."""
    embedding: Literal["none", "learned", "sinusoidal", "row_column"] = "learned"
    """Position embedding that is added to the tokens. learned: a vector per position. sinusoidal:
    sinusoids of the position. row_column: learned combinations of waves over the row and the column
    (`row_and_column_waves`)."""
    rotary: Literal["none", "sequence", "axial"] = "none"
    """Rotary embedding of queries and keys. sequence: by position in the sequence. axial: by row
    and column."""
    min_wavelength: float = 4.0
    """rotary=axial only: period of the fastest pair, in pixels."""
    max_wavelength: float = 1024.0
    """rotary=axial only: period of the slowest pair, in pixels."""
    local_start: float = 0.0
    """With rotary positions, each head starts by attending to one neighbour with this attention
    score (`model.neighbours`); a higher score is a narrower focus. 0: heads start with uniform
    attention."""
    pooling: Literal["mean", "max", "mean_max", "cls"] = "mean"
    """How the tokens of an example become one vector. mean, max, mean_max: their mean, their max,
    or both concatenated, without padding. cls: an extra token before the others."""
    documents: int = 1
    """Sequences in an example: 1, or 2 that are encoded separately and compared by the head."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "model", "vocab_size", most=1024)  # a wide one-hot matrix is slow
        check_positive(self, "model", "n_classes", most=MAX_VOCAB_SIZE)
        check_positive(self, "model", "context_length", most=MAX_CONTEXT)
        if self.documents not in (1, 2):
            raise ValueError(f"model.documents={self.documents} must be 1 or 2.")
        if self.grid_width is None:
            for name, value in (("embedding", "row_column"), ("rotary", "axial")):
                if getattr(self, name) == value:
                    raise ValueError(
                        f"model.{name}={value} needs rows and columns: set model.grid_width."
                    )
        else:
            check_positive(self, "model", "grid_width", most=2**15)
        if not 0.0 <= self.local_start < math.inf:
            raise ValueError(
                f"model.local_start={self.local_start} must be a finite number of at least 0."
            )
        if self.local_start and self.rotary == "none":
            raise ValueError(
                f"model.local_start={self.local_start} requires rotary positions: set "
                "model.rotary to sequence or axial, or leave it 0."
            )
        if self.local_start and self.pooling == "cls":
            raise ValueError(
                f"model.local_start={self.local_start} would make the cls token start by attending "
                "only to the first tokens: set model.pooling to mean, max or mean_max, or leave it "
                "0."
            )
        for name in ("n_kv_head", "qk_norm"):
            if self.local_start and getattr(self, name):
                raise ValueError(
                    f"model.local_start={self.local_start} requires biases of queries and keys for "
                    f"each head: leave out model.{name}, or set model.local_start=0."
                )
        if self.local_start and not self.bias:
            raise ValueError(
                f"model.local_start={self.local_start} requires biases of queries and keys: set "
                "model.bias=true, or leave it 0."
            )
        multiple = {"none": 1, "sequence": 2, "axial": 4}[self.rotary]
        if self.head_dim % multiple:
            raise ValueError(
                f"{self._head_size_text()}, and model.rotary={self.rotary} needs a multiple of "
                f"{multiple}."
            )
        if self.embedding == "sinusoidal" and self.n_embd % 2:
            raise ValueError(f"model.n_embd={self.n_embd} must be even for sinusoidal positions.")
        if not 0 < self.min_wavelength < self.max_wavelength:
            raise ValueError(
                f"model.min_wavelength={self.min_wavelength} must be between 0 and "
                f"model.max_wavelength={self.max_wavelength}."
            )

    @property
    def n_positions(self) -> int:
        """Number of positions: pixels of the image, or tokens of the text."""
        return self.context_length if self.grid_width is None else self.grid_width**2

    @property
    def seq_len(self) -> int:
        """Sequence length in attention: context_length, plus one for a cls token."""
        return self.context_length + (self.pooling == "cls")
