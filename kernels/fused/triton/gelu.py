"""Bias and GELU, forward and backward in one pass over memory each; PyTorch does the products.

The tanh form of the GELU is x * s, with s = sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3). The
sigmoid keeps its relative precision for negative x, where 1 + tanh(u) cancels.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...triton.primitives import LOG2E
from .sums import add_parts

# Measured on an H100. A program of the backward pass processes ROWS * STEPS rows of COLUMNS
# numbers, so that few partial sums of columns are left to add.
ROWS, COLUMNS, STEPS, NUM_STAGES, NUM_WARPS = 32, 128, 8, 3, 8
CUBIC = tl.constexpr(0.044715)
TWICE = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi)


@triton.jit
def gate(x):
    """Gate s = sigmoid(2 u) of the GELU."""
    # exp2 is one instruction; exp would first multiply by log2(e), which is in the constant here.
    return 1.0 / (1.0 + tl.exp2((x + x * x * x * CUBIC) * (-TWICE * LOG2E)))


@triton.jit
def bias_gelu_kernel(
    h_ptr,
    bias_ptr,  # or None
    g_ptr, n_rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write one tile of the GELU."""
    # int64, because an offset into (N, F) may exceed 2^31.
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (rows < n_rows)[:, None] & (columns < width)[None, :]
    at = rows[:, None] * width + columns[None, :]
    x = tl.load(h_ptr + at, inside, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + columns, columns < width, other=0.0).to(tl.float32)[None, :]
    tl.store(g_ptr + at, (x * gate(x)).to(g_ptr.dtype.element_ty), inside)


@triton.jit
def bias_gelu_bwd_kernel(
    dg_ptr, h_ptr,
    bias_ptr,  # or None
    dh_ptr,
    g_ptr,  # the GELU again, or None
    sums_ptr,  # (programs along rows, width) fp32: column sums of dh; None without a bias
    n_rows, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEPS: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Process STEPS tiles, one below the other, with the loads of later tiles in flight."""
    first = tl.program_id(0).to(tl.int64) * (ROWS * STEPS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    bias = tl.zeros((COLUMNS,), tl.float32)
    if bias_ptr is not None:
        bias += tl.load(bias_ptr + columns, columns < width, other=0.0).to(tl.float32)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in tl.range(0, STEPS, num_stages=NUM_STAGES):
        rows = first + step * ROWS + tl.arange(0, ROWS)
        inside = (rows < n_rows)[:, None] & (columns < width)[None, :]
        at = rows[:, None] * width + columns[None, :]
        x = tl.load(h_ptr + at, inside, other=0.0).to(tl.float32) + bias[None, :]
        dg = tl.load(dg_ptr + at, inside, other=0.0).to(tl.float32)
        # d(x s)/dx = s + x s', with s' = s (1 - s) * d(2 u)/dx
        s = gate(x)
        dx = dg * (s + x * s * (1.0 - s) * (1.0 + x * x * (3.0 * CUBIC)) * TWICE)
        # The rows of the tile are summed once, after the loop. Rows outside have dg = 0, so dx = 0.
        sums += dx
        tl.store(dh_ptr + at, dx.to(dh_ptr.dtype.element_ty), inside)
        if g_ptr is not None:
            tl.store(g_ptr + at, (x * s).to(g_ptr.dtype.element_ty), inside)
    # The gradient of the bias: a partial sum for each program. `add_parts` adds them in a fixed
    # order, so that repeated calls give the same bits; atomics would not.
    if sums_ptr is not None:
        of_program = sums_ptr + tl.program_id(0) * width + columns
        tl.store(of_program, tl.sum(sums, 0), columns < width)


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Same as `kernels.fused.reference.gelu.linear_gelu`."""
    h = x @ weight.T
    n_rows, width = h.shape
    g = torch.empty_like(h)
    grid = triton.cdiv(n_rows, ROWS), triton.cdiv(width, COLUMNS)
    bias_gelu_kernel[grid](
        h, bias, g, n_rows, width,
        ROWS=ROWS, COLUMNS=COLUMNS, num_warps=NUM_WARPS, enable_fp_fusion=True,
    )  # fmt: skip
    return h, g


def linear_gelu_bwd(
    dy: Tensor, weight: Tensor, h: Tensor, bias: Tensor | None, recompute: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Same as `kernels.fused.reference.gelu.linear_gelu_bwd`; h is contiguous."""
    dg = dy @ weight
    n_rows, width = h.shape
    dh, g_again = torch.empty_like(h), torch.empty_like(h) if recompute else None
    grid = triton.cdiv(n_rows, ROWS * STEPS), triton.cdiv(width, COLUMNS)
    sums = None if bias is None else h.new_empty(grid[0], width, dtype=torch.float32)
    bias_gelu_bwd_kernel[grid](
        dg, h, bias, dh, g_again, sums, n_rows, width,
        ROWS=ROWS, COLUMNS=COLUMNS, STEPS=STEPS, NUM_STAGES=NUM_STAGES, num_warps=NUM_WARPS,
        enable_fp_fusion=True,
    )  # fmt: skip
    return dh, None if bias is None else add_parts(sums, bias.dtype), g_again
