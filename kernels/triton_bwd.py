"""The backward pass in portable Triton: Ampere and later, and the interpreter.

FlashAttention-2's backward (arXiv 2307.08691, Algorithm 2) recomputes the probabilities from the
saved log-sum-exp, tile by tile. Three launches, none with atomics, so a run repeats bit for bit:

    delta   rowsum(dout * out), the part of the softmax gradient that all keys of a row share
    dk, dv  a program owns BLOCK_N keys and walks over the queries that see them
    dq      a program owns BLOCK_M queries and walks over the keys that they see

The gradient of lse enters through delta: d lse_i / d s_ij = p_ij, so that
ds = p * (dp - (delta - dlse)).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.primitives import LOG2E, dropout_head_key, dropout_keep, load_tile, store_tile
from kernels.tuning import backward_dkdv_tiles, backward_dq_tiles, dot_precision, dropout_threshold


@triton.jit(do_not_specialize=["seq_q"])
def _attn_bwd_delta_kernel(
    out_ptr,
    dout_ptr,
    dlse_ptr,
    delta_ptr,
    stride_ob,
    stride_ot,
    stride_oh,
    stride_dob,
    stride_dot,
    stride_doh,
    n_head,
    seq_q,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HAS_DLSE: tl.constexpr,
):
    n_tiles = tl.cdiv(seq_q, BLOCK_M)
    start_m = tl.program_id(0) % n_tiles * BLOCK_M
    batch_head = tl.program_id(0) // n_tiles
    batch = (batch_head // n_head).to(tl.int64)
    head = (batch_head % n_head).to(tl.int64)
    out_ptr += batch * stride_ob + head * stride_oh
    dout_ptr += batch * stride_dob + head * stride_doh
    row_start = batch_head.to(tl.int64) * seq_q

    rows = tl.arange(0, BLOCK_M)
    offs_m = start_m + rows
    offs_d = tl.arange(0, BLOCK_D)
    out = load_tile(out_ptr, start_m, stride_ot, rows, offs_d, seq_q, HEAD_DIM, BLOCK_D, True)
    dout = load_tile(dout_ptr, start_m, stride_dot, rows, offs_d, seq_q, HEAD_DIM, BLOCK_D, True)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    inside = offs_m < seq_q
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + row_start + offs_m, mask=inside, other=0.0)
    tl.store(delta_ptr + row_start + offs_m, delta, mask=inside)


@triton.jit
def _load_lse_log2(lse_ptr, offs_m, seq_q):
    """lse in units of log2, +inf for rows that see no key or do not exist: exp2(s - inf) is 0."""
    lse = tl.load(lse_ptr + offs_m, mask=offs_m < seq_q, other=float("inf"))
    return tl.where(lse == -float("inf"), float("inf"), lse * LOG2E)


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
        lse_log2 = _load_lse_log2(lse_ptr, offs_m, seq_q)
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
def _attn_bwd_dkdv_kernel(
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
            visible = key[None, :] < seq_k
            if IS_CAUSAL:
                visible = visible & (key[None, :] <= offs_m[:, None] + diagonal)
            p = tl.where(visible, p, 0.0)
        dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
        if HAS_DROPOUT:
            keep = dropout_keep(head_key, offs_m[:, None], key[None, :], threshold)
            dp = tl.where(keep, dp * keep_scale, 0.0)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=["seq_q", "seq_k", "threshold"])
def _attn_bwd_dq_kernel(
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

    full = seq_k
    end = seq_k
    if IS_CAUSAL:
        full = tl.minimum(seq_k, tl.maximum(0, start_m + diagonal + 1))
        end = tl.minimum(seq_k, tl.maximum(0, start_m + BLOCK_M + diagonal))
    full = full // BLOCK_N * BLOCK_N

    q = load_tile(q_ptr, start_m, stride_qt, rows, offs_d, seq_q, HEAD_DIM, BLOCK_D, True)
    dout = load_tile(dout_ptr, start_m, stride_dot, rows, offs_d, seq_q, HEAD_DIM, BLOCK_D, True)
    lse_log2 = _load_lse_log2(lse_ptr + row_start, offs_m, seq_q)
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


def attn_bwd(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    softmax_scale: float,
    causal: bool,
    dropout_p: float,
    dropout_seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the three backward kernels.

    Args:
        dout: (B, T_q, H, D) in the dtype of q; dlse: (B, H, T_q) fp32, or None.
        q, k, v, out, lse: as `kernels.triton_fwd.attn_fwd` took and gave them.

    Returns:
        dq (B, T_q, H, D), dk and dv (B, T_k, H_kv, D) in the dtype of q.
    """
    batch, seq_q, n_head, head_dim = q.shape
    seq_k, n_kv_head = k.shape[1], k.shape[2]
    if dout.stride(-1) != 1:
        dout = dout.contiguous()
    dq = torch.empty((batch, seq_q, n_head, head_dim), dtype=q.dtype, device=q.device)
    dk = torch.empty((batch, seq_k, n_kv_head, head_dim), dtype=k.dtype, device=k.device)
    dv = torch.empty_like(dk)
    delta = torch.empty_like(lse)

    tiles = backward_dq_tiles(q)
    _attn_bwd_delta_kernel[(triton.cdiv(seq_q, tiles.block_m) * batch * n_head,)](
        out,
        dout,
        None if dlse is None else dlse.contiguous(),
        delta,
        *out.stride()[:3],
        *dout.stride()[:3],
        n_head=n_head,
        seq_q=seq_q,
        HEAD_DIM=head_dim,
        BLOCK_D=tiles.block_d,
        BLOCK_M=tiles.block_m,
        HAS_DLSE=dlse is not None,
        num_warps=4,
    )

    shared = {
        "seq_q": seq_q,
        "seq_k": seq_k,
        "softmax_scale": softmax_scale,
        "scale_log2": softmax_scale * LOG2E.value,
        "keep_scale": 1.0 / (1.0 - dropout_p),
        "threshold": dropout_threshold(dropout_p),
        "GROUP": n_head // n_kv_head,
        "HEAD_DIM": head_dim,
        "BLOCK_D": tiles.block_d,
        "IS_CAUSAL": causal,
        "HAS_DROPOUT": dropout_p > 0.0,
        "PRECISION": dot_precision(q.dtype),
    }
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *dout.stride()[:3])
    _attn_bwd_dq_kernel[(triton.cdiv(seq_q, tiles.block_m) * batch * n_head,)](
        q,
        k,
        v,
        dout,
        lse,
        delta,
        dq,
        dropout_seed,
        *strides,
        *dq.stride()[:3],
        n_head=n_head,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        enable_fp_fusion=True,
        **shared,
    )
    tiles = backward_dkdv_tiles(q)
    _attn_bwd_dkdv_kernel[(triton.cdiv(seq_k, tiles.block_n) * batch * n_kv_head,)](
        q,
        k,
        v,
        dout,
        lse,
        delta,
        dk,
        dv,
        dropout_seed,
        *strides,
        *dk.stride()[:3],
        n_kv_head=n_kv_head,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        enable_fp_fusion=True,
        **shared,
    )
    return dq, dk, dv
