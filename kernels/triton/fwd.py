"""Forward pass in portable Triton, for Ampere and newer GPUs and for Triton's interpreter.

FlashAttention-2's loop order (arXiv 2307.08691, Algorithm 1): a program owns BLOCK_M queries, loops
over the tiles of keys that they see, and divides by the softmax denominator once, at the end. From
the log-sum-exp of each row, the backward pass recomputes the probabilities. A block-sparse mask
changes only which tiles are visited (arXiv 2205.14135, Algorithm 5).

Letters: B batch, T tokens, H heads, D head_dim; M queries and N keys of a tile.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..options import AttentionOptions
from .block_ranges import UNSPECIALIZED, Call, is_visible, key_range, loop_bounds, tile_start
from .operands import operand, worth_describing
from .primitives import (
    LN2,
    LOG2E,
    add_alibi,
    cap_scores,
    dropout_head_key,
    dropout_keep,
    load_slope,
    load_tile,
    store_tile,
)
from .tuning import forward_tiles, launch_options, mask_head_stride, tiles_per_head


@triton.jit
def _attend(
    acc, l_i, m_i, q_tile, k, v, batch, kv_head, key_tiles, start_m, lower, upper, head_key, slope,
    call, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    features: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Process the key tiles of one of the two loops: update output, denominator and maximum.

    With MASKED, it is the loop over tiles in which some query does not see some key.
    """
    seq_k = call.seq_k
    begin, end, block = loop_bounds(key_tiles, MASKED)
    for offset in tl.range(begin, end, BLOCK_N):
        start_n, block = tile_start(offset, end, block, key_tiles, BLOCK_N, features, MASKED)
        key = start_n + tl.arange(0, BLOCK_N)

        # Scores Q K^T. Full tiles end before seq_k, so only the masked loop checks row bounds.
        k_tile = load_tile(k, batch, kv_head, start_n, seq_k, HEAD_DIM, BLOCK_N, BLOCK_D, MASKED)
        qk = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        qk = cap_scores(qk, call.softcap_scale, features)
        position = start_m + (seq_k - call.seq_q) + tl.arange(0, q_tile.shape[0])
        qk = add_alibi(qk, position[:, None], key[None, :], slope, features)
        if MASKED:
            visible = is_visible(key[None, :], lower[:, None], upper[:, None], features)
            qk = tl.where(visible, qk, -float("inf"))

        # Online softmax in base 2. The scale is positive, so the maximum can be taken before it is
        # applied; the subtraction below is then one fused multiply-add per score.
        m_new = tl.maximum(m_i, tl.max(qk, 1) * call.scale_log2)
        # A row that has seen no key yet has maximum -inf; -inf - -inf would be NaN.
        pivot = tl.where(m_new == -float("inf"), 0.0, m_new) if MASKED else m_new
        p = tl.exp2(qk * call.scale_log2 - pivot[:, None])
        # alpha rescales the sums so far, which are relative to the old maximum. It is 0 where that
        # is -inf.
        alpha = tl.exp2(m_i - pivot)
        l_i = l_i * alpha + tl.sum(p, 1)

        # Dropout comes after the denominator: lse must not depend on it.
        if features.dropout:
            m, n = tl.arange(0, q_tile.shape[0]), tl.arange(0, BLOCK_N)
            keep = dropout_keep(head_key, start_m, m[:, None], start_n, n[None, :], call.threshold)
            p *= tl.where(keep, call.keep_scale, 0.0)

        # Rescale the output and add P V. P is rounded to the dtype of V for the tensor cores; the
        # denominator above adds it up unrounded.
        v_tile = load_tile(v, batch, kv_head, start_n, seq_k, HEAD_DIM, BLOCK_N, BLOCK_D, MASKED)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], input_precision=PRECISION)
        m_i = m_new
    return acc, l_i, m_i


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attn_fwd_kernel(
    q, k, v, k_masked, v_masked, out, lse_ptr, seed_ptr, doc_ptr, lengths_ptr, sinks_ptr,
    slopes_ptr, rows_ptr, row_blocks_ptr, n_tiles, n_head, mask_head_stride, seq_q, seq_k,
    window_size, scale_log2, softcap_scale, keep_scale, threshold, first_query,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_N_MASKED: tl.constexpr, features: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program for each batch, head and tile of queries: write its rows of out and lse."""
    call = Call(
        seq_q, seq_k, window_size, scale_log2, softcap_scale, keep_scale, threshold, first_query,
        seed_ptr, doc_ptr, lengths_ptr, rows_ptr, row_blocks_ptr, mask_head_stride,
    )  # fmt: skip
    # Consecutive programs work on tiles of one head, so that its keys and values stay in L2.
    tile = tl.program_id(0) % n_tiles
    batch_head = tl.program_id(0) // n_tiles
    batch, head = batch_head // n_head, batch_head % n_head
    start_m, offs_m, lower, upper, key_tiles = key_range(
        tile, n_tiles, batch, head, call, BLOCK_M, BLOCK_N, BLOCK_N_MASKED, features
    )

    # Q stays on chip for all tiles; the sums start empty.
    q_tile = load_tile(q, batch, head, start_m, seq_q, HEAD_DIM, BLOCK_M, BLOCK_D, True)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    m_i = tl.full([BLOCK_M], -float("inf"), tl.float32)  # of scores in units of log2
    if features.sinks:
        # A sink is one more key, with a score and with value 0. The maximum starts at its score, so
        # its weight is 1.
        l_i += 1.0
        m_i = l_i * (tl.load(sinks_ptr + head) * LOG2E)
    head_key = dropout_head_key(batch_head, call) if features.dropout else 0
    slope = load_slope(slopes_ptr, head, features)
    # Loop 0 visits the full tiles, loop 1 the masked ones; a loop without tiles is not compiled.
    for masked in tl.static_range(1 - features.unmasked_loop, 1 + features.masked_loop):
        acc, l_i, m_i = _attend(
            acc, l_i, m_i, q_tile,
            k_masked if masked == 1 and k_masked is not None else k,
            v_masked if masked == 1 and v_masked is not None else v,
            batch, head // GROUP, key_tiles, start_m, lower, upper, head_key, slope, call,
            HEAD_DIM, BLOCK_D, BLOCK_N_MASKED if masked else BLOCK_N, features, PRECISION,
            MASKED=masked == 1,
        )  # fmt: skip

    # Normalize once, instead of in each tile, and write lse for the backward pass. A row that sees
    # no key has out 0 and lse -inf.
    empty = l_i == 0.0
    lse = tl.where(empty, -float("inf"), m_i * LN2 + tl.log(tl.where(empty, 1.0, l_i)))
    acc *= (1.0 / tl.where(empty, 1.0, l_i))[:, None]
    lse_ptr += tl.cast(batch_head, tl.int64) * seq_q
    tl.store(lse_ptr + offs_m, lse, mask=offs_m < seq_q)
    store_tile(out, batch, head, start_m, seq_q, acc, HEAD_DIM, BLOCK_M, BLOCK_D)


def attn_fwd(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Launch the forward kernel.

    Args:
        q: (B, T_q, H, D) fp16, bf16 or fp32, last dimension contiguous; k, v: (B, T_k, H_kv, D).
        out: written, last dimension contiguous; None: a contiguous tensor is allocated.

    Returns:
        out (B, T_q, H, D) in the dtype of q and lse (B, H, T_q) fp32, natural logarithm.
    """
    batch, seq_q, n_head, head_dim = q.shape
    if out is None:
        out = torch.empty((batch, seq_q, n_head, head_dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, n_head, seq_q), dtype=torch.float32, device=q.device)
    tiles = forward_tiles(q, k, options)
    shared = launch_options(q, k, options)
    tile = partial(operand, block_d=tiles.block_d, described=worth_describing(q, k))
    # A TMA descriptor fixes the shape of its tiles, so a masked loop with smaller tiles needs two
    # descriptors of its own.
    cut = shared["features"].masked_loop and tiles.block_n_masked != tiles.block_n
    n_tiles = tiles_per_head(seq_q, tiles.block_m, options)
    attn_fwd_kernel[(n_tiles * batch * n_head,)](
        tile(q, tiles.block_m), tile(k, tiles.block_n), tile(v, tiles.block_n),
        tile(k, tiles.block_n_masked) if cut else None,
        tile(v, tiles.block_n_masked) if cut else None,
        tile(out, tiles.block_m), lse,
        options.dropout_seed, options.doc_start, options.kv_lengths, options.sinks,
        options.alibi_slopes, options.mask_rows, options.mask_row_blocks,
        n_tiles=n_tiles, n_head=n_head, mask_head_stride=mask_head_stride(options.mask_rows),
        BLOCK_N_MASKED=tiles.block_n_masked, **shared, **tiles.launch,
    )  # fmt: skip
    return out, lse
