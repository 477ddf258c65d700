"""dk and dv: a program owns BLOCK_N keys and walks over the queries that see them.

The mathematics is in kernels/triton/bwd.py.
"""

import triton
import triton.language as tl

from .block_ranges import (
    Call,
    in_view,
    key_tile_start,
    load_doc_start,
    n_keys_of,
    query_walk,
    visible_keys,
    walk_loop,
    walk_tile,
)
from .primitives import (
    cap_scores,
    dropout_head_key,
    dropout_keep,
    load_tile,
    store_tile,
)


@triton.jit
def _accumulate_dkdv(
    dk, dv, k_tile, v_tile, q, dout, lse_log2_ptr, delta_ptr, batch, head, walk, start_n, key,
    n_keys, head_key, call, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    features: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add what the queries of one loop of the walk give to a tile of keys.

    Scores lie transposed, (N, M). Queries that do not exist have p = 0 by their lse.
    """
    begin, end, block = walk_loop(walk, MASKED)
    for offset in tl.range(begin, end, BLOCK_M):
        start_m, block = walk_tile(offset, end, block, walk, BLOCK_M, features, MASKED)
        offs_m = start_m + tl.arange(0, BLOCK_M)
        q_tile = load_tile(q, batch, head, start_m, call.seq_q, HEAD_DIM, BLOCK_M, BLOCK_D, True)
        lse_log2 = tl.load(lse_log2_ptr + offs_m)
        qk_t = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)
        qk_t = cap_scores(qk_t, call.softcap_scale, features)
        p_t = tl.exp2(qk_t * call.scale_log2 - lse_log2[None, :])
        if MASKED:
            diagonal = call.seq_k - call.seq_q
            lower, upper = visible_keys(offs_m, n_keys, diagonal, call.window_size, features)
            if features.documents:
                lower = tl.maximum(lower, load_doc_start(batch, offs_m, call))
            p_t = tl.where(
                in_view(key[:, None], lower[None, :], upper[None, :], features), p_t, 0.0
            )
        dout_tile = load_tile(
            dout, batch, head, start_m, call.seq_q, HEAD_DIM, BLOCK_M, BLOCK_D, True
        )
        dp_t = tl.dot(v_tile, tl.trans(dout_tile), input_precision=PRECISION)
        p_kept_t = p_t
        if features.dropout:
            m, n = tl.arange(0, BLOCK_M), tl.arange(0, k_tile.shape[0])
            keep_t = dropout_keep(
                head_key, start_m, m[None, :], start_n, n[:, None], call.threshold
            )
            # A dropped probability lives on below zero: its sign needs no further register.
            p_t = tl.where(keep_t, p_t, -p_t)
            p_kept_t = tl.maximum(p_t, 0.0, propagate_nan=tl.PropagateNan.ALL)
            dp_t = tl.where(p_t < 0.0, 0.0, dp_t * call.keep_scale)
        dv = tl.dot(p_kept_t.to(dout_tile.dtype), dout_tile, dv, input_precision=PRECISION)
        delta = tl.load(delta_ptr + offs_m)
        ds_t = (tl.abs(p_t) if features.dropout else p_t) * (dp_t - delta[None, :])
        if features.softcap:
            ds_t *= 1.0 - qk_t * qk_t
        dk = tl.dot(ds_t.to(q_tile.dtype), q_tile, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(
    do_not_specialize=["n_tiles", "seq_q", "seq_k", "window_size", "mask_head_stride", "threshold"]
)
def attn_bwd_dkdv_kernel(
    q, k, v, dout, dk, dv, lse_log2_ptr, delta_ptr, seed_ptr, doc_ptr, doc_bounds_ptr, lengths_ptr,
    cols_ptr, col_blocks_ptr, n_tiles, n_kv_head, padded_q, mask_head_stride, seq_q, seq_k,
    window_size, scale_log2, softmax_scale, softcap_scale, keep_scale, threshold,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, features: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    call = Call(
        seq_q, seq_k, window_size, scale_log2, softcap_scale, keep_scale, threshold, seed_ptr,
        doc_ptr, lengths_ptr, cols_ptr, col_blocks_ptr, mask_head_stride,
    )  # fmt: skip
    # One loop over the tiles that need no mask, one over the others; either may be left out.
    FIRST_LOOP: tl.constexpr = 0 if features.unmasked_loop else 1
    LAST_LOOP: tl.constexpr = 2 if features.masked_loop else 1
    # Tiles of a head side by side, as in the forward kernel, and first keys first: under a causal
    # mask most queries see them.
    tile = tl.program_id(0) % n_tiles
    batch = tl.program_id(0) // n_tiles // n_kv_head
    kv_head = tl.program_id(0) // n_tiles % n_kv_head
    start_n = key_tile_start(tile, kv_head * GROUP, call, BLOCK_N, features)
    key = start_n + tl.arange(0, BLOCK_N)
    n_keys = n_keys_of(batch, call, features)

    k_tile = load_tile(k, batch, kv_head, start_n, seq_k, HEAD_DIM, BLOCK_N, BLOCK_D, True)
    v_tile = load_tile(v, batch, kv_head, start_n, seq_k, HEAD_DIM, BLOCK_N, BLOCK_D, True)
    dk_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for group in tl.range(GROUP):
        head = kv_head * GROUP + group
        batch_head = batch * (n_kv_head * GROUP) + head
        row = tl.cast(batch_head, tl.int64) * padded_q
        head_key = dropout_head_key(seed_ptr, batch_head) if features.dropout else 0
        walk = query_walk(
            tile, start_n, batch, head, doc_bounds_ptr, n_keys, call, BLOCK_M, BLOCK_N, features
        )
        for masked in tl.static_range(FIRST_LOOP, LAST_LOOP):
            dk_acc, dv_acc = _accumulate_dkdv(
                dk_acc, dv_acc, k_tile, v_tile, q, dout, lse_log2_ptr + row, delta_ptr + row,
                batch, head, walk, start_n, key, n_keys, head_key, call, HEAD_DIM, BLOCK_D,
                BLOCK_M, features, PRECISION, MASKED=masked == 1,
            )  # fmt: skip
    dk_acc *= softmax_scale
    if features.dropout:
        dv_acc *= keep_scale
    store_tile(dk, batch, kv_head, start_n, seq_k, dk_acc, HEAD_DIM, BLOCK_N, BLOCK_D)
    store_tile(dv, batch, kv_head, start_n, seq_k, dv_acc, HEAD_DIM, BLOCK_N, BLOCK_D)
