"""The gradient of a LayerNorm in one pass over memory, with what is summed over rows."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .sums import add_parts

# measured on an H100; fewer programs leave fewer partial sums
PROGRAMS_PER_SM, NUM_STAGES, COLUMNS_PER_WARP = 2, 5, 512
MOST_AHEAD = 64 * 1024  # bytes of shared memory for rows ahead of their use


@triton.jit
def layer_norm_bwd_kernel(
    ds_ptr,
    dn_ptr,
    s_ptr,
    mean_ptr,
    rstd_ptr,
    weight_ptr,
    dx_ptr,
    sums_ptr,  # (programs, 3, width) fp32: of dn times the normalised s, of dn, and of dx
    n_rows,
    width,
    BLOCK_C: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Every so-many-th row a program, loaded ahead of its use."""
    columns = tl.arange(0, BLOCK_C)
    distance = tl.zeros([], tl.int64) + width  # rows may be beyond the reach of 32 bits
    inside = columns < width
    weight = tl.load(weight_ptr + columns, inside, other=0.0).to(tl.float32)
    of_weight = tl.zeros([BLOCK_C], tl.float32)
    of_bias = tl.zeros([BLOCK_C], tl.float32)
    of_dx = tl.zeros([BLOCK_C], tl.float32)
    for row in tl.range(tl.program_id(0), n_rows, tl.num_programs(0), num_stages=NUM_STAGES):
        at = row * distance + columns
        ds = tl.load(ds_ptr + at, inside, other=0.0).to(tl.float32)
        dn = tl.load(dn_ptr + at, inside, other=0.0).to(tl.float32)
        s = tl.load(s_ptr + at, inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        normal = (s - tl.load(mean_ptr + row)) * rstd
        slope = dn * weight
        along = tl.sum(slope * normal, 0) / width
        offset = tl.sum(slope, 0) / width
        dx = ds + (slope - offset - normal * along) * rstd
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), inside)
        of_weight += dn * normal
        of_bias += dn
        of_dx += dx
    sums = sums_ptr + tl.program_id(0) * 3 * width + columns
    tl.store(sums, of_weight, inside)
    tl.store(sums + width, of_bias, inside)
    tl.store(sums + 2 * width, of_dx, inside)


def layer_norm_bwd(
    ds: Tensor, dn: Tensor, s: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient of s from that of s and that of its normalisation, and sums over rows.

    Args:
        ds, dn, s: (N, C), contiguous.
        mean, rstd: (N,), of the rows of s; weight: (C,).

    Returns:
        (N, C) in the dtype of s, and (3, C) fp32: of dn times the normalised s, of dn, and of the
        gradient before it is rounded.
    """
    n_rows, width = s.shape
    dx = torch.empty_like(s)
    n_programs = min(n_rows, PROGRAMS_PER_SM * _n_multiprocessors(s.device))
    sums = s.new_empty(n_programs, 3, width, dtype=torch.float32)
    block = triton.next_power_of_2(width)
    ahead = MOST_AHEAD // (3 * block * s.element_size())
    layer_norm_bwd_kernel[(n_programs,)](
        ds, dn, s, mean, rstd, weight, dx, sums, n_rows, width,
        BLOCK_C=block, NUM_STAGES=min(1 + ahead, NUM_STAGES),
        num_warps=max(1, min(16, block // COLUMNS_PER_WARP)),
    )  # fmt: skip
    return dx, add_parts(sums.flatten(1)).view(3, width)


def _n_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # Triton's interpreter
    return torch.cuda.get_device_properties(device).multi_processor_count
