"""What a call of attention asks for, beside q, k and v."""

import functools
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

# Kernels visit the tiles that need no mask in one loop, the others in another.
UNMASKED_LOOP, MASKED_LOOP = 1, 2


class AttentionOptions(NamedTuple):
    """The options of one call, as the operators of kernels/ops.py take them, in their order.

    Meanings are those of `kernels.flash_attention`. The lists of a block-sparse mask are those of
    `kernels.block_mask.MaskLists`, all four or none.
    """

    dropout_seed: Tensor | None = None  # (1,) int64, needed where dropout_p > 0
    doc_start: Tensor | None = None  # (B, T_q) int32, contiguous
    kv_lengths: Tensor | None = None  # (B,) int32, contiguous
    sinks: Tensor | None = None  # (H,) fp32, contiguous
    mask_rows: Tensor | None = None
    mask_row_blocks: Tensor | None = None
    mask_cols: Tensor | None = None
    mask_col_blocks: Tensor | None = None
    mask_block_size: int = 0  # 0 without a mask
    mask_loops: int = UNMASKED_LOOP | MASKED_LOOP  # those that have a tile to visit
    softmax_scale: float = 1.0
    causal: bool = False
    window_size: int = 0  # 0 without a window
    softcap: float = 0.0  # 0 without a cap
    dropout_p: float = 0.0

    @property
    def features(self) -> "Features":
        """The part of the options that a kernel is compiled for."""
        return _features(
            causal=self.causal,
            window=self.window_size > 0,
            documents=self.doc_start is not None,
            lengths=self.kv_lengths is not None,
            softcap=self.softcap > 0.0,
            sinks=self.sinks is not None,
            dropout=self.dropout_p > 0.0,
            mask_block_size=self.mask_block_size,
            unmasked_loop=self.mask_loops & UNMASKED_LOOP > 0,
            masked_loop=self.mask_loops & MASKED_LOOP > 0,
        )


@dataclass(frozen=True)
class Features:
    """Which options are in use: a compile-time constant, so that unused ones cost nothing."""

    causal: bool = False
    window: bool = False
    documents: bool = False
    lengths: bool = False
    softcap: bool = False
    sinks: bool = False
    dropout: bool = False
    mask_block_size: int = 0
    unmasked_loop: bool = True
    masked_loop: bool = True


_features = functools.cache(Features)


# The schema of the options in torch.library's language, one entry a field.
OPTIONS_SCHEMA = (
    "Tensor? dropout_seed, Tensor? doc_start, Tensor? kv_lengths, Tensor? sinks, "
    "Tensor? mask_rows, Tensor? mask_row_blocks, Tensor? mask_cols, Tensor? mask_col_blocks, "
    "int mask_block_size, int mask_loops, float softmax_scale, bool causal, int window_size, "
    "float softcap, float dropout_p"
)
