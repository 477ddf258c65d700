"""The forward pass in portable Triton: Ampere and later, and the interpreter.

FlashAttention-2's loop order (arXiv 2307.08691, Algorithm 1): a program owns BLOCK_M queries, walks
over the keys, and divides by the softmax denominator once, at the end. Out of it come the output
and the log-sum-exp of each row, all that the backward pass needs to recompute the probabilities.

Letters: B batch, T tokens, H heads, D head_dim; M and N for tiles of queries and keys.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.primitives import (
    LN2,
    LOG2E,
    dropout_head_key,
    dropout_keep,
    key_bounds,
    load_tile,
    store_tile,
    visible_keys,
)
from kernels.tuning import dot_precision, dropout_threshold, forward_tiles


@triton.jit
def _attend(
    acc,
    l_i,
    m_i,
    q,
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
    """Fold the keys of [start, end) into the running maximum, denominator and output.

    MASKED serves the tiles that the causal diagonal or the end of the sequence cuts; all others
    take the same steps with no mask.
    """
    for start_n in tl.range(start, end, BLOCK_N):
        k = load_tile(k_ptr, start_n, stride_kt, offs_n, offs_d, seq_k, HEAD_DIM, BLOCK_D, MASKED)
        qk = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if MASKED:
            key = start_n + offs_n
            visible = visible_keys(offs_m, key, seq_k, diagonal, IS_CAUSAL)
            qk = tl.where(visible, qk, -float("inf"))
        m_new = tl.maximum(m_i, tl.max(qk, 1) * scale_log2)
        # A row that has seen no key yet has maximum -inf; -inf - -inf would be NaN.
        pivot = tl.where(m_new == -float("inf"), 0.0, m_new) if MASKED else m_new
        p = tl.exp2(qk * scale_log2 - pivot[:, None])
        alpha = tl.exp2(m_i - pivot)
        l_i = l_i * alpha + tl.sum(p, 1)
        if HAS_DROPOUT:
            keep = dropout_keep(head_key, offs_m[:, None], (start_n + offs_n)[None, :], threshold)
            p = tl.where(keep, p, 0.0)
        v = load_tile(v_ptr, start_n, stride_vt, offs_n, offs_d, seq_k, HEAD_DIM, BLOCK_D, MASKED)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
        m_i = m_new
    return acc, l_i, m_i


@triton.jit(do_not_specialize=["seq_q", "seq_k", "threshold"])
def _attn_fwd_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
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
    stride_ob,
    stride_ot,
    stride_oh,
    n_head,
    seq_q,
    seq_k,
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
    # All tiles of a head run side by side, so that its keys and values stay in the L2 cache. Last
    # rows first: under a causal mask they see most keys, and a long tile must not start last.
    n_tiles = tl.cdiv(seq_q, BLOCK_M)
    start_m = (n_tiles - 1 - tl.program_id(0) % n_tiles) * BLOCK_M
    batch_head = tl.program_id(0) // n_tiles
    batch = (batch_head // n_head).to(tl.int64)
    head = (batch_head % n_head).to(tl.int64)
    q_ptr += batch * stride_qb + head * stride_qh
    k_ptr += batch * stride_kb + (head // GROUP) * stride_kh
    v_ptr += batch * stride_vb + (head // GROUP) * stride_vh
    out_ptr += batch * stride_ob + head * stride_oh
    lse_ptr += batch_head.to(tl.int64) * seq_q

    rows = tl.arange(0, BLOCK_M)
    offs_m = start_m + rows
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    diagonal = seq_k - seq_q  # query i sees key j iff j <= i + diagonal
    head_key = dropout_head_key(seed_ptr, batch_head) if HAS_DROPOUT else 0

    full, end = key_bounds(start_m, seq_k, diagonal, BLOCK_M, BLOCK_N, IS_CAUSAL)

    q = load_tile(q_ptr, start_m, stride_qt, rows, offs_d, seq_q, HEAD_DIM, BLOCK_D, True)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    m_i = tl.full([BLOCK_M], -float("inf"), tl.float32)  # of scores in units of log2
    for masked in tl.static_range(2):
        acc, l_i, m_i = _attend(
            acc,
            l_i,
            m_i,
            q,
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

    empty = l_i == 0.0
    lse = tl.where(empty, -float("inf"), m_i * LN2 + tl.log(tl.where(empty, 1.0, l_i)))
    out = acc * (keep_scale / tl.where(empty, 1.0, l_i))[:, None]
    tl.store(lse_ptr + offs_m, lse, mask=offs_m < seq_q)
    store_tile(out_ptr, start_m, stride_ot, rows, offs_d, seq_q, out, HEAD_DIM, BLOCK_D)


def attn_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float,
    causal: bool,
    dropout_p: float,
    dropout_seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Launch the forward kernel.

    Args:
        q: (B, T_q, H, D) fp16, bf16 or fp32, last dimension contiguous; k, v: (B, T_k, H_kv, D).
        dropout_seed: int64 (1,) on the device of q, needed where dropout_p > 0.

    Returns:
        out (B, T_q, H, D) in the dtype of q and lse (B, H, T_q) fp32, natural logarithm.
    """
    batch, seq_q, n_head, head_dim = q.shape
    seq_k, n_kv_head = k.shape[1], k.shape[2]
    out = torch.empty((batch, seq_q, n_head, head_dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, n_head, seq_q), dtype=torch.float32, device=q.device)
    tiles = forward_tiles(q)
    grid = (triton.cdiv(seq_q, tiles.block_m) * batch * n_head,)
    _attn_fwd_kernel[grid](
        q,
        k,
        v,
        out,
        lse,
        dropout_seed,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *out.stride()[:3],
        n_head=n_head,
        seq_q=seq_q,
        seq_k=seq_k,
        scale_log2=softmax_scale * LOG2E.value,
        keep_scale=1.0 / (1.0 - dropout_p),
        threshold=dropout_threshold(dropout_p),
        GROUP=n_head // n_kv_head,
        HEAD_DIM=head_dim,
        BLOCK_D=tiles.block_d,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        IS_CAUSAL=causal,
        HAS_DROPOUT=dropout_p > 0.0,
        PRECISION=dot_precision(q.dtype),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        enable_fp_fusion=True,
    )
    return out, lse
