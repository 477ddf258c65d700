"""Attention of some keys and attention of others, made that of all: what ring attention adds up."""

import triton
import triton.language as tl
from torch import Tensor

ROWS = 32  # of a program; memory is all that this takes time for


@triton.jit(do_not_specialize=["n_rows", "lse_head", "part_lse_head"])
def merge_kernel(
    out_ptr,
    lse_ptr,
    part_ptr,
    part_lse_ptr,
    n_rows,
    n_head,
    out_batch,
    lse_batch,
    lse_head,
    part_lse_head,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Program (i, b) takes the i-th rows of sample b: a row is a head of a token."""
    batch = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < n_rows
    token, head = row // n_head, row % n_head
    lse_ptr += batch * lse_batch + head.to(tl.int64) * lse_head + token
    part_lse_ptr += (batch * n_head + head) * part_lse_head + token
    a = tl.load(lse_ptr, mask=inside, other=-float("inf"))
    b = tl.load(part_lse_ptr, mask=inside, other=-float("inf"))
    m = tl.maximum(a, b)
    pivot = tl.where(m == -float("inf"), 0.0, m)  # of a row that sees no key: -inf - -inf
    p_a, p_b = tl.exp(a - pivot), tl.exp(b - pivot)
    total = p_a + p_b
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    tl.debug_barrier()  # every warp has loaded these rows: none may find what another has stored
    tl.store(lse_ptr, tl.where(empty, -float("inf"), pivot + tl.log(total)), mask=inside)

    column = tl.arange(0, BLOCK_D)
    there = inside[:, None] & (column[None, :] < HEAD_DIM)
    offset = row.to(tl.int64)[:, None] * HEAD_DIM + column[None, :]
    out_ptr += batch * out_batch + offset
    x = tl.load(out_ptr, mask=there, other=0.0).to(tl.float32)
    y = tl.load(part_ptr + batch * n_rows * HEAD_DIM + offset, mask=there, other=0.0)
    merged = x * (p_a / total)[:, None] + y.to(tl.float32) * (p_b / total)[:, None]
    tl.store(out_ptr, merged.to(out_ptr.dtype.element_ty), mask=there)


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Launch it: `kernels.reference.partial.merge`.

    Args:
        out: (B, T, H, D), a token's heads side by side; tokens may be left out of each sample.
        lse: (B, H, T) fp32, likewise.
        part, part_lse: (B, T, H, D) and (B, H, T) fp32, contiguous.
    """
    batch, seq_len, n_head, head_dim = out.shape
    n_rows = seq_len * n_head
    merge_kernel[(triton.cdiv(n_rows, ROWS), batch)](
        out,
        lse,
        part,
        part_lse,
        n_rows=n_rows,
        n_head=n_head,
        out_batch=out.stride(0),
        lse_batch=lse.stride(0),
        lse_head=lse.stride(1),
        part_lse_head=part_lse.stride(1),
        HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        ROWS=ROWS,
    )
