"""The shape of a classifier of sequences and images."""

import math
from dataclasses import dataclass
from typing import Literal

from kernels.limits import MAX_VOCAB_SIZE
from model.config import MAX_CONTEXT, MAX_WIDTH, BlockConfig, check_positive


@dataclass(frozen=True, kw_only=True)
class ClassifierConfig(BlockConfig):
    """A bidirectional encoder with a pooled head; the defaults are the Transformer of Table 3.

    Two layers of width 64 with two heads: the model of Xiong et al. 2021 (Nystromformer, arXiv
    2102.03902), which the FlashAttention paper's Long Range Arena follows (appendix E.3).

    Raises:
        ValueError: a field, or two fields together, that no model can be built from.
    """

    vocab_size: int
    """Token ids that the model knows: at least as many as the data have."""
    n_classes: int
    """Labels to tell apart: as many as the data have."""
    context_length: int
    """Tokens of an example, padding included: at least those of the longest image; longer texts are
    cut."""
    n_layer: int = 2
    n_head: int = 2
    n_embd: int = 64
    n_inner: int = 128
    """Width of the MLP between its two layers."""
    tokens: Literal["symbols", "intensities"] = "symbols"
    """symbols: embeddings start unrelated. intensities: those of near values start close by, as
    pixels of an image."""
    grid_width: int | None = None
    """Pixels in a row of a square image; null where the tokens are a text."""
    embedding: Literal["none", "learned", "sinusoidal", "row_column"] = "learned"
    """What is added to the embedded tokens: a learned vector a position, sinusoids of it, or
    learned combinations of waves over the row and the column (`row_and_column_waves`)."""
    rotary: Literal["none", "sequence", "axial"] = "none"
    """How queries and keys are turned: by their position in the sequence, or by row and column."""
    min_wavelength: float = 4.0
    """rotary=axial only: pixels in which the fastest pair turns once."""
    max_wavelength: float = 1024.0
    """rotary=axial only: pixels in which the slowest pair turns once."""
    local_start: float = 0.0
    """With rotary positions: the score by which each head begins by looking at a neighbour, more
    narrowly the higher it is (`model.neighbours`). 0: all heads begin by looking everywhere
    alike."""
    pooling: Literal["mean", "max", "mean_max", "cls"] = "mean"
    """How an example's tokens become one vector: their mean, their max, or both side by side,
    padding left out; or, with cls, a token of its own before the others."""
    documents: int = 1
    """Sequences that an example consists of: 1, or 2 that are encoded apart and compared by the
    head."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "model", "vocab_size", most=1024)  # a wide one-hot matrix is slow
        check_positive(self, "model", "n_classes", most=MAX_VOCAB_SIZE)
        check_positive(self, "model", "context_length", most=MAX_CONTEXT)
        check_positive(self, "model", "n_inner", most=4 * MAX_WIDTH)
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
            raise ValueError(f"model.local_start={self.local_start} must be a number from 0 on.")
        if self.local_start and self.rotary == "none":
            raise ValueError(
                f"model.local_start={self.local_start} is made of rotary positions: set "
                "model.rotary to sequence or axial, or leave it 0."
            )
        if self.local_start and self.pooling == "cls":
            raise ValueError(
                f"model.local_start={self.local_start} would have the cls begin by seeing the "
                "first tokens alone: set model.pooling to mean, max or mean_max, or leave it 0."
            )
        for name in ("n_kv_head", "qk_norm"):
            if self.local_start and getattr(self, name):
                raise ValueError(
                    f"model.local_start={self.local_start} is made of biases of queries and keys "
                    f"head by head: leave model.{name} out, or model.local_start=0."
                )
        if self.local_start and not self.bias:
            raise ValueError(
                f"model.local_start={self.local_start} is made of biases of queries and keys: set "
                "model.bias=true, or leave it 0."
            )
        multiple = {"none": 1, "sequence": 2, "axial": 4}[self.rotary]
        if self.head_dim % multiple:
            raise ValueError(
                f"model.n_embd={self.n_embd} over model.n_head={self.n_head} gives heads of "
                f"{self.head_dim}, and model.rotary={self.rotary} needs a multiple of {multiple}."
            )
        if self.embedding == "sinusoidal" and self.n_embd % 2:
            raise ValueError(f"model.n_embd={self.n_embd} must be even for sinusoidal positions.")
        if not 0 < self.min_wavelength < self.max_wavelength:
            raise ValueError(
                f"model.min_wavelength={self.min_wavelength} must lie between 0 and "
                f"model.max_wavelength={self.max_wavelength}."
            )

    @property
    def mlp_width(self) -> int:
        """Width of the MLP between its two layers."""
        return self.n_inner

    @property
    def n_positions(self) -> int:
        """Places that a token can have: pixels of the image, or tokens of the text."""
        return self.context_length if self.grid_width is None else self.grid_width**2

    @property
    def seq_len(self) -> int:
        """Tokens that attention sees in a row: with a cls, one more than context_length."""
        return self.context_length + (self.pooling == "cls")
