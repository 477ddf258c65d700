"""Merge attention over two sets of keys into attention over both, for ring attention."""

import triton
import triton.language as tl
from torch import Tensor

ROWS = 32  # rows of a program; the kernel is bound by memory bandwidth


@triton.jit(do_not_specialize=["n_rows", "lse_head", "part_lse_head"])
def merge_kernel(
    out_ptr, lse_ptr, part_ptr, part_lse_ptr, n_rows, n_head, out_batch, lse_batch, lse_head,
    part_lse_head, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Program (i, b) merges the i-th ROWS rows of sample b, where a row is one head of a token."""
    batch = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < n_rows
    token, head = row // n_head, row % n_head
    lse_ptr += batch * lse_batch + head.to(tl.int64) * lse_head + token
    part_lse_ptr += (batch * n_head + head) * part_lse_head + token

    # The weights of the two results are exp(lse), relative to the larger one, so none overflows.
    a = tl.load(lse_ptr, mask=inside, other=-float("inf"))
    b = tl.load(part_lse_ptr, mask=inside, other=-float("inf"))
    m = tl.maximum(a, b)
    # A row that sees no key in either set has -inf - -inf = NaN: subtract 0 instead.
    pivot = tl.where(m == -float("inf"), 0.0, m)
    p_a, p_b = tl.exp(a - pivot), tl.exp(b - pivot)
    total = p_a + p_b
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    # Warps hold copies of the same rows: all must have loaded before any of them stores.
    tl.debug_barrier()
    tl.store(lse_ptr, tl.where(empty, -float("inf"), pivot + tl.log(total)), mask=inside)

    # out = (exp(a) out + exp(b) part) / (exp(a) + exp(b)), in fp32.
    column = tl.arange(0, BLOCK_D)
    there = inside[:, None] & (column[None, :] < HEAD_DIM)
    offset = row.to(tl.int64)[:, None] * HEAD_DIM + column[None, :]
    out_ptr += batch * out_batch + offset
    x = tl.load(out_ptr, mask=there, other=0.0).to(tl.float32)
    y = tl.load(part_ptr + batch * n_rows * HEAD_DIM + offset, mask=there, other=0.0)
    merged = x * (p_a / total)[:, None] + y.to(tl.float32) * (p_b / total)[:, None]
    tl.store(out_ptr, merged.to(out_ptr.dtype.element_ty), mask=there)


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Launch the kernel for `kernels.reference.partial.merge`: update out and lse in place.

    Args:
        out: (B, T, H, D); tokens contiguous within a sample, which may be part of a longer one.
        lse: (B, H, T) fp32; as out, with tokens contiguous within a head.
        part, part_lse: (B, T, H, D) and (B, H, T) fp32, contiguous.
    """
    batch, seq_len, n_head, head_dim = out.shape
    n_rows = seq_len * n_head
    merge_kernel[(triton.cdiv(n_rows, ROWS), batch)](
        out, lse, part, part_lse, n_rows, n_head, out.stride(0), lse.stride(0), lse.stride(1),
        part_lse.stride(1), head_dim, triton.next_power_of_2(head_dim), ROWS,
        enable_fp_fusion=True,
    )  # fmt: skip
