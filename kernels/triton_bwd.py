"""The backward pass in portable Triton: Ampere and later, and the interpreter.

FlashAttention-2's backward (arXiv 2307.08691, Algorithm 2) recomputes the probabilities from the
saved log-sum-exp, tile by tile. Three launches, none with atomics, so a run repeats bit for bit:

    delta   rowsum(dout * out), the part of the softmax gradient that all keys of a row share
    dk, dv  a program owns BLOCK_N keys and walks over the queries that see them
    dq      a program owns BLOCK_M queries and walks over the keys that they see

The first kernel and the launcher are here, the others in triton_bwd_dkdv.py and triton_bwd_dq.py.

The gradient of lse enters through delta: d lse_i / d s_ij = p_ij, so that
ds = p * (dp - (delta - dlse)).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.primitives import LOG2E, load_tile
from kernels.strides import rows_in_reach
from kernels.triton_bwd_dkdv import attn_bwd_dkdv_kernel
from kernels.triton_bwd_dq import attn_bwd_dq_kernel
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
    if dout.stride(-1) != 1 or not rows_in_reach(dout):
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
    attn_bwd_dq_kernel[(triton.cdiv(seq_q, tiles.block_m) * batch * n_head,)](
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
    attn_bwd_dkdv_kernel[(triton.cdiv(seq_k, tiles.block_n) * batch * n_kv_head,)](
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
