"""Kernel for dk and dv: a program owns BLOCK_N keys and loops over the query tiles that see them.

The mathematics is in kernels/triton/bwd.py.
"""

import triton
import triton.language as tl

from .block_ranges import (
    UNSPECIALIZED,
    Call,
    is_visible,
    load_doc_start,
    loop_bounds,
    mask_entry,
    n_keys_of,
    query_range,
    tile_start,
    visible_keys,
)
from .primitives import (
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
def _accumulate_dkdv(
    dk, dv, k_tile, v_tile, q, dout, lse_log2_ptr, delta_ptr, batch, head, query_tiles, start_n,
    key, n_keys, head_key, slope, call, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, features: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the query tiles of one of the two loops to dk and dv.

    Scores are transposed, (N, M), because the products for dv and dk take P^T and dS^T. Rows past
    the last query have lse +inf, so their p is 0.
    """
    seq_q = call.seq_q
    begin, end, block = loop_bounds(query_tiles, MASKED)
    for offset in tl.range(begin, end, BLOCK_M):
        start_m, block = tile_start(offset, end, block, query_tiles, BLOCK_M, features, MASKED)
        offs_m = start_m + tl.arange(0, BLOCK_M)

        # Recompute P^T = exp(S^T - lse). Rows of q and dout are always checked, as full blocks of a
        # mask may reach past the last query. lse and delta are padded to whole tiles instead.
        q_tile = load_tile(q, batch, head, start_m, seq_q, HEAD_DIM, BLOCK_M, BLOCK_D, True)
        lse_log2 = tl.load(lse_log2_ptr + offs_m)
        qk_t = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)
        qk_t = cap_scores(qk_t, call.softcap_scale, features)
        position = offs_m + (call.seq_k - seq_q)
        qk_t = add_alibi(qk_t, position[None, :], key[:, None], slope, features)
        p_t = tl.exp2(qk_t * call.scale_log2 - lse_log2[None, :])
        if MASKED:
            # The queries change with each tile, so their intervals are computed in the loop.
            diagonal = call.seq_k - seq_q
            lower, upper = visible_keys(offs_m, n_keys, diagonal, call.window_size, features)
            if features.documents:
                lower = tl.maximum(lower, load_doc_start(batch, offs_m, call))
            visible = is_visible(key[:, None], lower[None, :], upper[None, :], features)
            p_t = tl.where(visible, p_t, 0.0)

        # dP^T = V dO^T. With dropout, only the kept part of P enters dV, but all of it enters dS.
        dout_tile = load_tile(dout, batch, head, start_m, seq_q, HEAD_DIM, BLOCK_M, BLOCK_D, True)
        dp_t = tl.dot(v_tile, tl.trans(dout_tile), input_precision=PRECISION)
        p_kept_t = p_t
        if features.dropout:
            m, n = tl.arange(0, BLOCK_M)[None, :], tl.arange(0, k_tile.shape[0])[:, None]
            keep_t = dropout_keep(head_key, start_m, m, start_n, n, call.threshold)
            # Mark a dropped probability by its sign: a separate mask would take more registers.
            p_t = tl.where(keep_t, p_t, -p_t)
            p_kept_t = tl.maximum(p_t, 0.0, propagate_nan=tl.PropagateNan.ALL)
            dp_t = tl.where(p_t < 0.0, 0.0, dp_t * call.keep_scale)

        # dV += P^T dO, in fp32: only the operand P is rounded to the input dtype for the tensor
        # cores. keep_scale is applied once, at the end.
        dv = tl.dot(p_kept_t.to(dout_tile.dtype), dout_tile, dv, input_precision=PRECISION)

        # dS^T = P^T (dP^T - delta), times the derivative of the cap; then dK += dS^T Q.
        delta = tl.load(delta_ptr + offs_m)
        ds_t = (tl.abs(p_t) if features.dropout else p_t) * (dp_t - delta[None, :])
        ds_t = uncap_gradient(ds_t, qk_t, features)
        dk = tl.dot(ds_t.to(q_tile.dtype), q_tile, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attn_bwd_dkdv_kernel(
    q, k, v, dout, dk, dv, lse_log2_ptr, delta_ptr, seed_ptr, doc_ptr, doc_bounds_ptr, lengths_ptr,
    slopes_ptr, cols_ptr, col_blocks_ptr, n_tiles, n_kv_head, padded_q, mask_head_stride, seq_q,
    seq_k, window_size, scale_log2, softmax_scale, softcap_scale, keep_scale, threshold,
    first_query, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, features: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program for each batch, key-value head and tile of keys: write its rows of dk and dv."""
    call = Call(
        seq_q, seq_k, window_size, scale_log2, softcap_scale, keep_scale, threshold, first_query,
        seed_ptr, doc_ptr, lengths_ptr, cols_ptr, col_blocks_ptr, mask_head_stride,
    )  # fmt: skip
    # Consecutive programs work on tiles of one head, as in the forward kernel. Longest work first:
    # under a causal mask, most queries see the first keys.
    tile = tl.program_id(0) % n_tiles
    batch = tl.program_id(0) // n_tiles // n_kv_head
    kv_head = tl.program_id(0) // n_tiles % n_kv_head
    if features.mask_block_size > 0:
        start_n, _ = mask_entry(kv_head * GROUP, tile, call, BLOCK_N, features)
    else:
        start_n = tile * BLOCK_N
    key = start_n + tl.arange(0, BLOCK_N)
    n_keys = n_keys_of(batch, call, features)

    # K and V stay on chip for all tiles of queries, and of all query heads in the group.
    k_tile = load_tile(k, batch, kv_head, start_n, seq_k, HEAD_DIM, BLOCK_N, BLOCK_D, True)
    v_tile = load_tile(v, batch, kv_head, start_n, seq_k, HEAD_DIM, BLOCK_N, BLOCK_D, True)
    dk_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    # Grouped-query attention: a program serves all query heads of its keys, one after the other.
    # Their sum stays in registers, and needs neither atomics nor a second pass.
    for group in tl.range(GROUP):
        head = kv_head * GROUP + group
        batch_head = batch * (n_kv_head * GROUP) + head
        row = tl.cast(batch_head, tl.int64) * padded_q
        head_key = dropout_head_key(batch_head, call) if features.dropout else 0
        slope = load_slope(slopes_ptr, head, features)
        query_tiles = query_range(
            tile, start_n, batch, head, doc_bounds_ptr, n_keys, call, BLOCK_M, BLOCK_N, features
        )
        # Loop 0: the full tiles, loop 1: the masked ones; a loop without tiles is not compiled.
        for masked in tl.static_range(1 - features.unmasked_loop, 1 + features.masked_loop):
            dk_acc, dv_acc = _accumulate_dkdv(
                dk_acc, dv_acc, k_tile, v_tile, q, dout, lse_log2_ptr + row, delta_ptr + row,
                batch, head, query_tiles, start_n, key, n_keys, head_key, slope, call, HEAD_DIM,
                BLOCK_D, BLOCK_M, features, PRECISION, MASKED=masked == 1,
            )  # fmt: skip
    # Factors that all terms share are applied once, after the loop.
    dk_acc *= softmax_scale
    if features.dropout:
        dv_acc *= keep_scale
    store_tile(dk, batch, kv_head, start_n, seq_k, dk_acc, HEAD_DIM, BLOCK_N, BLOCK_D)
    store_tile(dv, batch, kv_head, start_n, seq_k, dv_acc, HEAD_DIM, BLOCK_N, BLOCK_D)
