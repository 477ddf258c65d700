"""dk and dv: a program owns BLOCK_N keys and walks over the queries that see them.

The mathematics is in kernels/triton_bwd.py.
"""

import triton
import triton.language as tl

from kernels.primitives import (
    dropout_head_key,
    dropout_keep,
    load_lse_log2,
    load_tile,
    store_tile,
)


@triton.jit
def _accumulate_dkdv(
    dk,
    dv,
    k,
    v,
    q_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    stride_qt,
    stride_dot,
    first,
    rows,
    offs_n,
    offs_d,
    seq_q,
    diagonal,
    scale_log2,
    keep_scale,
    head_key,
    threshold,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add what the queries from `first` on give to one tile of keys; scores lie transposed (N, M).

    Only the causal diagonal needs a mask: rows past the end have p = 0 by their lse, and what
    columns past the end gather is never stored.
    """
    for start_m in tl.range(first, seq_q, BLOCK_M):
        offs_m = start_m + rows
        q = load_tile(q_ptr, start_m, stride_qt, rows, offs_d, seq_q, HEAD_DIM, BLOCK_D, True)
        lse_log2 = load_lse_log2(lse_ptr, offs_m, seq_q)
        qk_t = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        p_t = tl.exp2(qk_t * scale_log2 - lse_log2[None, :])
        if IS_CAUSAL:
            p_t = tl.where(offs_n[:, None] <= offs_m[None, :] + diagonal, p_t, 0.0)
        dout = load_tile(
            dout_ptr, start_m, stride_dot, rows, offs_d, seq_q, HEAD_DIM, BLOCK_D, True
        )
        dp_t = tl.dot(v, tl.trans(dout), input_precision=PRECISION)
        p_kept_t = p_t
        if HAS_DROPOUT:
            keep = dropout_keep(head_key, offs_m[None, :], offs_n[:, None], threshold)
            p_kept_t = tl.where(keep, p_t, 0.0)
            dp_t = tl.where(keep, dp_t * keep_scale, 0.0)
        dv = tl.dot(p_kept_t.to(dout.dtype), dout, dv, input_precision=PRECISION)
        delta = tl.load(delta_ptr + offs_m, mask=offs_m < seq_q, other=0.0)
        ds_t = p_t * (dp_t - delta[None, :])
        dk = tl.dot(ds_t.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["seq_q", "seq_k", "threshold"])
def attn_bwd_dkdv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    seed_ptr,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    stride_dob,
    stride_dot,
    stride_doh,
    stride_dkb,
    stride_dkt,
    stride_dkh,
    n_kv_head,
    seq_q,
    seq_k,
    softmax_scale,
    scale_log2,
    keep_scale,
    threshold,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # Tiles of a head side by side, as in the forward kernel, and first keys first: under a causal
    # mask most queries see them.
    n_tiles = tl.cdiv(seq_k, BLOCK_N)
    start_n = tl.program_id(0) % n_tiles * BLOCK_N
    batch_kv_head = tl.program_id(0) // n_tiles
    batch = (batch_kv_head // n_kv_head).to(tl.int64)
    kv_head = (batch_kv_head % n_kv_head).to(tl.int64)
    k_ptr += batch * stride_kb + kv_head * stride_kh
    v_ptr += batch * stride_vb + kv_head * stride_vh
    dk_ptr += batch * stride_dkb + kv_head * stride_dkh
    dv_ptr += batch * stride_dkb + kv_head * stride_dkh

    cols = tl.arange(0, BLOCK_N)
    offs_n = start_n + cols
    rows = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    diagonal = seq_k - seq_q  # query i sees key j iff j <= i + diagonal

    # Queries before this one see none of the keys. That all later tiles take the mask, also where
    # the diagonal does not cut them, costs less than a second loop with a pipeline of its own.
    first = 0
    if IS_CAUSAL:
        first = tl.maximum(0, start_n - diagonal) // BLOCK_M * BLOCK_M

    k = load_tile(k_ptr, start_n, stride_kt, cols, offs_d, seq_k, HEAD_DIM, BLOCK_D, True)
    v = load_tile(v_ptr, start_n, stride_vt, cols, offs_d, seq_k, HEAD_DIM, BLOCK_D, True)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for group in tl.range(GROUP):
        head = kv_head * GROUP + group
        batch_head = batch * (n_kv_head * GROUP) + head
        head_key = dropout_head_key(seed_ptr, batch_head) if HAS_DROPOUT else 0
        dk, dv = _accumulate_dkdv(
            dk,
            dv,
            k,
            v,
            q_ptr + batch * stride_qb + head * stride_qh,
            dout_ptr + batch * stride_dob + head * stride_doh,
            lse_ptr + batch_head * seq_q,
            delta_ptr + batch_head * seq_q,
            stride_qt,
            stride_dot,
            first,
            rows,
            offs_n,
            offs_d,
            seq_q,
            diagonal,
            scale_log2,
            keep_scale,
            head_key,
            threshold,
            HEAD_DIM=HEAD_DIM,
            BLOCK_D=BLOCK_D,
            BLOCK_M=BLOCK_M,
            IS_CAUSAL=IS_CAUSAL,
            HAS_DROPOUT=HAS_DROPOUT,
            PRECISION=PRECISION,
        )
    dk *= softmax_scale
    dv *= keep_scale
    store_tile(dk_ptr, start_n, stride_dkt, cols, offs_d, seq_k, dk, HEAD_DIM, BLOCK_D)
    store_tile(dv_ptr, start_n, stride_dkt, cols, offs_d, seq_k, dv, HEAD_DIM, BLOCK_D)
