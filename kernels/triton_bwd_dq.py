"""dq: a program owns BLOCK_M queries and walks over the keys that they see.

The mathematics is in kernels/triton_bwd.py.
"""

import triton
import triton.language as tl

from kernels.primitives import (
    dropout_head_key,
    dropout_keep,
    key_bounds,
    load_lse_log2,
    load_tile,
    store_tile,
    visible_keys,
)


@triton.jit
def _accumulate_dq(
    dq,
    q,
    dout,
    lse_log2,
    delta,
    k_ptr,
    v_ptr,
    stride_kt,
    stride_vt,
    start,
    end,
    offs_m,
    offs_n,
    offs_d,
    seq_k,
    diagonal,
    scale_log2,
    keep_scale,
    head_key,
    threshold,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add what the keys of [start, end) give to the gradient of one tile of queries."""
    for start_n in tl.range(start, end, BLOCK_N):
        k = load_tile(k_ptr, start_n, stride_kt, offs_n, offs_d, seq_k, HEAD_DIM, BLOCK_D, MASKED)
        v = load_tile(v_ptr, start_n, stride_vt, offs_n, offs_d, seq_k, HEAD_DIM, BLOCK_D, MASKED)
        qk = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        p = tl.exp2(qk * scale_log2 - lse_log2[:, None])
        key = start_n + offs_n
        if MASKED:
            visible = visible_keys(offs_m, key, seq_k, diagonal, IS_CAUSAL)
            p = tl.where(visible, p, 0.0)
        dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
        if HAS_DROPOUT:
            keep = dropout_keep(head_key, offs_m[:, None], key[None, :], threshold)
            dp = tl.where(keep, dp * keep_scale, 0.0)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=["seq_q", "seq_k", "threshold"])
def attn_bwd_dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    dq_ptr,
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
    stride_dqb,
    stride_dqt,
    stride_dqh,
    n_head,
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
    # Tiles of a head side by side and last rows first, as in the forward kernel.
    n_tiles = tl.cdiv(seq_q, BLOCK_M)
    start_m = (n_tiles - 1 - tl.program_id(0) % n_tiles) * BLOCK_M
    batch_head = tl.program_id(0) // n_tiles
    batch = (batch_head // n_head).to(tl.int64)
    head = (batch_head % n_head).to(tl.int64)
    q_ptr += batch * stride_qb + head * stride_qh
    k_ptr += batch * stride_kb + (head // GROUP) * stride_kh
    v_ptr += batch * stride_vb + (head // GROUP) * stride_vh
    dout_ptr += batch * stride_dob + head * stride_doh
    dq_ptr += batch * stride_dqb + head * stride_dqh
    row_start = batch_head.to(tl.int64) * seq_q

    rows = tl.arange(0, BLOCK_M)
    offs_m = start_m + rows
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    diagonal = seq_k - seq_q
    head_key = dropout_head_key(seed_ptr, batch_head) if HAS_DROPOUT else 0

    full, end = key_bounds(start_m, seq_k, diagonal, BLOCK_M, BLOCK_N, IS_CAUSAL)

    q = load_tile(q_ptr, start_m, stride_qt, rows, offs_d, seq_q, HEAD_DIM, BLOCK_D, True)
    dout = load_tile(dout_ptr, start_m, stride_dot, rows, offs_d, seq_q, HEAD_DIM, BLOCK_D, True)
    lse_log2 = load_lse_log2(lse_ptr + row_start, offs_m, seq_q)
    delta = tl.load(delta_ptr + row_start + offs_m, mask=offs_m < seq_q, other=0.0)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for masked in tl.static_range(2):
        dq = _accumulate_dq(
            dq,
            q,
            dout,
            lse_log2,
            delta,
            k_ptr,
            v_ptr,
            stride_kt,
            stride_vt,
            full if masked else 0,
            end if masked else full,
            offs_m,
            offs_n,
            offs_d,
            seq_k,
            diagonal,
            scale_log2,
            keep_scale,
            head_key,
            threshold,
            HEAD_DIM=HEAD_DIM,
            BLOCK_D=BLOCK_D,
            BLOCK_N=BLOCK_N,
            IS_CAUSAL=IS_CAUSAL,
            HAS_DROPOUT=HAS_DROPOUT,
            MASKED=masked == 1,
            PRECISION=PRECISION,
        )
    dq *= softmax_scale
    store_tile(dq_ptr, start_m, stride_dqt, rows, offs_d, seq_q, dq, HEAD_DIM, BLOCK_D)
