"""Backward pass in portable Triton, for Ampere and newer GPUs and for Triton's interpreter.

FlashAttention-2's backward (arXiv 2307.08691, Algorithm 2) recomputes the probabilities from the
saved log-sum-exp, tile by tile. There are two launches, without atomics, so results repeat bit for
bit. The first computes dq, and delta = rowsum(dout * out) - dlse, the part of the softmax gradient
that is the same for all keys of a row (d lse_i / d s_ij = p_ij). The second computes dk and dv.

One kernel for all three gradients would save two of seven matrix products, but programs would have
to add to the same rows of dq: with atomics, whose order changes from run to run, or by waiting for
each other, as in kernels/hopper.
"""

from collections.abc import Sequence
from functools import partial

import torch
import triton
from torch import Tensor

from ..checks import rows_in_reach
from ..options import AttentionOptions
from .bwd_dkdv import attn_bwd_dkdv_kernel
from .bwd_dq import attn_bwd_dq_kernel
from .document_bounds import document_bounds
from .operands import operand, worth_describing
from .tuning import (
    backward_dkdv_tiles,
    backward_dq_tiles,
    launch_options,
    mask_head_stride,
    tiles_per_head,
)  # fmt: skip

# lse and delta are padded to whole tiles, because the dk, dv kernel is faster if the loads in its
# loop need no mask.
PADDED_ROWS = 128


def attn_bwd(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    options: AttentionOptions, grads: Sequence[Tensor],
) -> None:  # fmt: skip
    """Launch the two backward kernels.

    Args:
        dout: (B, T_q, H, D) in the dtype of q; dlse: (B, H, T_q) fp32, or None.
        q, k, v, out, lse: inputs and results of `kernels.triton.fwd.attn_fwd`.
        grads: dq, dk and dv, written: in the shapes and dtype of q, k and v, rows contiguous.
    """
    batch, seq_q, n_head, _ = q.shape
    seq_k, n_kv_head = k.shape[1], k.shape[2]
    # Autograd may pass a gradient with any strides: that of a sum is expanded, with strides of 0.
    if dout.stride(-1) != 1 or not rows_in_reach(dout):
        dout = dout.contiguous()
    dq, dk, dv = grads

    # Under a mask, tiles are parts of its blocks, and the last block may reach past the sequence.
    rows = options.mask_block_size or PADDED_ROWS
    padded_q = triton.cdiv(seq_q, rows) * rows
    lse_log2, delta = torch.empty(
        (2, batch, n_head, padded_q), dtype=torch.float32, device=q.device
    )
    shared = launch_options(q, k, options)
    shared |= {"padded_q": padded_q, "softmax_scale": options.softmax_scale}
    described = worth_describing(q, k)
    tiles = backward_dq_tiles(q, k, options)
    tile = partial(operand, block_d=tiles.block_d, described=described)
    # dq comes first: its kernel writes lse_log2 and delta, including the padding, which the other
    # kernel reads.
    n_tiles = padded_q // tiles.block_m
    attn_bwd_dq_kernel[(n_tiles * batch * n_head,)](
        # q, out and dout are read once, and not through TMA: the kernel says why.
        (q, *q.stride()[:3]), tile(k, tiles.block_n), tile(v, tiles.block_n),
        (out, *out.stride()[:3]), (dout, *dout.stride()[:3]), tile(dq, tiles.block_m),
        lse, None if dlse is None else dlse.contiguous(), lse_log2, delta,
        options.dropout_seed, options.doc_start, options.kv_lengths, options.alibi_slopes,
        options.mask_rows, options.mask_row_blocks,
        n_tiles=n_tiles, n_head=n_head, mask_head_stride=mask_head_stride(options.mask_rows),
        HAS_DLSE=dlse is not None, **shared, **tiles.launch,  # pyright: ignore
    )  # fmt: skip
    tiles = backward_dkdv_tiles(q, k, options)
    tile = partial(operand, block_d=tiles.block_d, described=described)
    n_tiles = tiles_per_head(seq_k, tiles.block_n, options)
    # With a mask, its column lists bound the queries, and documents only mask elements.
    doc_start, doc_bounds = options.doc_start, None
    if doc_start is not None and options.mask_cols is None:
        doc_bounds, _ = document_bounds(doc_start, seq_k, tiles.block_n)
    attn_bwd_dkdv_kernel[(n_tiles * batch * n_kv_head,)](
        # k and v are read once: they stay on chip, so TMA would not help.
        tile(q, tiles.block_m), (k, *k.stride()[:3]), (v, *v.stride()[:3]),
        tile(dout, tiles.block_m), tile(dk, tiles.block_n), tile(dv, tiles.block_n),
        lse_log2, delta, options.dropout_seed, doc_start, doc_bounds, options.kv_lengths,
        options.alibi_slopes, options.mask_cols, options.mask_col_blocks, n_tiles=n_tiles,
        n_kv_head=n_kv_head, mask_head_stride=mask_head_stride(options.mask_cols), **shared,
        **tiles.launch,
    )  # fmt: skip
