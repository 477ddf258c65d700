"""Add up the partial sums that the programs of another kernel have written."""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS = 128, 32


@triton.jit
def add_parts_kernel(
    parts_ptr,  # (n_parts, width) fp32
    totals_ptr,  # (width,)
    parts_stride, n_parts, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add all rows of a few columns. The work is small: with many programs it finishes sooner."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    # One program adds all parts of its columns, in a fixed order: repeated calls give the same
    # bits.
    for first in range(0, n_parts, ROWS):
        rows = first + tl.arange(0, ROWS)
        inside = (rows < n_parts)[:, None] & (columns < width)[None, :]
        at = parts_ptr + rows[:, None] * parts_stride + columns[None, :]
        total += tl.load(at, inside, other=0.0)
    total = tl.sum(total, 0).to(totals_ptr.dtype.element_ty)
    tl.store(totals_ptr + columns, total, columns < width)


def add_parts(parts: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Sum the rows of (parts, width) fp32, each row contiguous; returns (width,) in `dtype`.

    For the few hundred parts that kernels leave, PyTorch's sum is slower, as it runs few programs.
    """
    n_parts, width = parts.shape
    totals = parts.new_empty(width, dtype=dtype)
    add_parts_kernel[(triton.cdiv(width, COLUMNS),)](
        parts, totals, parts.stride(0), n_parts, width,
        ROWS=ROWS, COLUMNS=COLUMNS, enable_fp_fusion=True,
    )  # fmt: skip
    return totals
