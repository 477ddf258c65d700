"""Kernel for dq: a program owns BLOCK_M queries and loops over the key tiles that they see.

It also writes delta and lse for the dk, dv kernel. The mathematics is in kernels/triton/bwd.py.
"""

import triton
import triton.language as tl

from .block_ranges import UNSPECIALIZED, Call, is_visible, key_range, loop_bounds, tile_start
from .primitives import (
    LOG2E,
    add_alibi,
    cap_scores,
    dropout_head_key,
    dropout_keep,
    load_slope,
    load_tile,
    store_tile,
    uncap_gradient,
)  # fmt: skip


@triton.jit
def _accumulate_dq(
    dq, q_tile, dout_tile, lse_log2, delta, k, v, batch, kv_head, key_tiles, start_m, lower, upper,
    head_key, slope, call, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    features: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the key tiles of one of the two loops to dq."""
    seq_k = call.seq_k
    begin, end, block = loop_bounds(key_tiles, MASKED)
    for offset in tl.range(begin, end, BLOCK_N):
        start_n, block = tile_start(offset, end, block, key_tiles, BLOCK_N, features, MASKED)
        key = start_n + tl.arange(0, BLOCK_N)
        k_tile = load_tile(k, batch, kv_head, start_n, seq_k, HEAD_DIM, BLOCK_N, BLOCK_D, MASKED)
        v_tile = load_tile(v, batch, kv_head, start_n, seq_k, HEAD_DIM, BLOCK_N, BLOCK_D, MASKED)

        # Recompute P = exp(S - lse). With lse known, no running maximum is needed, and no tile has
        # to rescale the sum of the earlier ones.
        qk = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        qk = cap_scores(qk, call.softcap_scale, features)
        position = start_m + (seq_k - call.seq_q) + tl.arange(0, q_tile.shape[0])
        qk = add_alibi(qk, position[:, None], key[None, :], slope, features)
        p = tl.exp2(qk * call.scale_log2 - lse_log2[:, None])
        if MASKED:
            p = tl.where(is_visible(key[None, :], lower[:, None], upper[:, None], features), p, 0.0)

        # dP = dO V^T. Dropout scales P on its way to the output, and so its gradient.
        dp = tl.dot(dout_tile, tl.trans(v_tile), input_precision=PRECISION)
        if features.dropout:
            m, n = tl.arange(0, q_tile.shape[0]), tl.arange(0, BLOCK_N)
            keep = dropout_keep(head_key, start_m, m[:, None], start_n, n[None, :], call.threshold)
            dp *= tl.where(keep, call.keep_scale, 0.0)

        # dS = P (dP - delta), times the derivative of the cap; then dQ += dS K, in fp32. Only the
        # operand dS is rounded to the input dtype for the tensor cores.
        ds = uncap_gradient(p * (dp - delta[:, None]), qk, features)
        dq = tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attn_bwd_dq_kernel(
    q, k, v, out, dout, dq, lse_ptr, dlse_ptr, lse_log2_ptr, delta_ptr, seed_ptr, doc_ptr,
    lengths_ptr, slopes_ptr, rows_ptr, row_blocks_ptr, n_tiles, n_head, padded_q,
    mask_head_stride, seq_q, seq_k, window_size, scale_log2, softmax_scale, softcap_scale,
    keep_scale, threshold, first_query, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, features: tl.constexpr,
    PRECISION: tl.constexpr, HAS_DLSE: tl.constexpr,
):  # fmt: skip
    """One program for each batch, head and tile of queries: write its rows of dq, delta and lse."""
    call = Call(
        seq_q, seq_k, window_size, scale_log2, softcap_scale, keep_scale, threshold, first_query,
        seed_ptr, doc_ptr, lengths_ptr, rows_ptr, row_blocks_ptr, mask_head_stride,
    )  # fmt: skip
    # Consecutive programs work on tiles of one head, as in the forward kernel.
    tile = tl.program_id(0) % n_tiles
    batch_head = tl.program_id(0) // n_tiles
    batch, head = batch_head // n_head, batch_head % n_head
    start_m, offs_m, lower, upper, key_tiles = key_range(
        tile, n_tiles, batch, head, call, BLOCK_M, BLOCK_N, BLOCK_N, features
    )

    # Read the rows of this program. Not through TMA: a program waits for each TMA load where it is
    # issued, while these three loads are in flight together.
    out_tile = load_tile(out, batch, head, start_m, seq_q, HEAD_DIM, BLOCK_M, BLOCK_D, True)
    dout_tile = load_tile(dout, batch, head, start_m, seq_q, HEAD_DIM, BLOCK_M, BLOCK_D, True)
    q_tile = load_tile(q, batch, head, start_m, seq_q, HEAD_DIM, BLOCK_M, BLOCK_D, True)

    # delta = rowsum(dO O) - dlse: with it, the softmax gradient of a tile needs no other key.
    delta = tl.sum(out_tile.to(tl.float32) * dout_tile.to(tl.float32), 1)
    row = tl.cast(batch_head, tl.int64)
    inside = offs_m < seq_q
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + row * seq_q + offs_m, mask=inside, other=0.0)
    lse = tl.load(lse_ptr + row * seq_q + offs_m, mask=inside, other=-float("inf"))
    # Rows that see no key or are past the end get +inf: exp2(s - inf) is 0 without a test.
    lse_log2 = tl.where(lse == -float("inf"), float("inf"), lse * LOG2E)
    # Both buffers are padded to whole tiles. Fill the padding: the other kernel reads it unmasked.
    tl.store(lse_log2_ptr + row * padded_q + offs_m, lse_log2)
    tl.store(delta_ptr + row * padded_q + offs_m, delta)

    head_key = dropout_head_key(batch_head, call) if features.dropout else 0
    slope = load_slope(slopes_ptr, head, features)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # Loop 0 visits the full tiles, loop 1 the masked ones; a loop without tiles is not compiled.
    for masked in tl.static_range(1 - features.unmasked_loop, 1 + features.masked_loop):
        acc = _accumulate_dq(
            acc, q_tile, dout_tile, lse_log2, delta, k, v, batch, head // GROUP, key_tiles, start_m,
            lower, upper, head_key, slope, call, HEAD_DIM, BLOCK_D, BLOCK_N, features, PRECISION,
            MASKED=masked == 1,
        )  # fmt: skip
    # dS is the gradient of scaled scores. The scale, common to all tiles, is applied once.
    acc *= softmax_scale
    store_tile(dq, batch, head, start_m, seq_q, acc, HEAD_DIM, BLOCK_M, BLOCK_D)
