"""Gradient of a LayerNorm or an RMSNorm and its sums over rows, in one pass over memory."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .sums import add_parts

# Measured on an H100. With fewer programs, fewer partial sums are left to add.
PROGRAMS_PER_SM, NUM_STAGES, COLUMNS_PER_WARP = 2, 5, 512
MAX_PREFETCH = 64 * 1024  # bytes of shared memory for prefetched rows


@triton.jit
def layer_norm_bwd_kernel(
    ds_ptr, dn_ptr, s_ptr,
    mean_ptr,  # None: an RMSNorm, which subtracts no mean
    rstd_ptr, weight_ptr, dx_ptr,
    sums_ptr,  # (programs, 3, width) fp32: of dn times the normalised s, of dn, and of dx
    n_rows, width, BLOCK_C: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Process every N-th row, with N programs and the loads of later rows in flight."""
    columns = tl.arange(0, BLOCK_C)
    row_stride = tl.zeros([], tl.int64) + width  # offsets may exceed 32 bits
    inside = columns < width
    weight = tl.load(weight_ptr + columns, inside, other=0.0).to(tl.float32)
    # Sums over the rows of this program: the gradients of weight and bias, and the sum of dx.
    # Padding columns hold 0 in ds and dn, and are not stored.
    dweight = tl.zeros([BLOCK_C], tl.float32)
    dbias = tl.zeros([BLOCK_C], tl.float32)
    dx_sum = tl.zeros([BLOCK_C], tl.float32)
    for row in tl.range(tl.program_id(0), n_rows, tl.num_programs(0), num_stages=NUM_STAGES):
        at = row * row_stride + columns
        ds = tl.load(ds_ptr + at, inside, other=0.0).to(tl.float32)
        dn = tl.load(dn_ptr + at, inside, other=0.0).to(tl.float32)
        s = tl.load(s_ptr + at, inside, other=0.0).to(tl.float32)
        # Normalise again: to save memory, the forward pass kept s itself, but of its normalisation
        # only the mean and 1 / standard deviation of each row.
        rstd = tl.load(rstd_ptr + row)
        if mean_ptr is not None:
            s -= tl.load(mean_ptr + row)
        normal = s * rstd
        # Scaling a row does not change its normalisation, and shifting it does not change a
        # LayerNorm's, so remove these components of the gradient; then add that of the stream.
        dnormal = dn * weight
        dx = dnormal - normal * (tl.sum(dnormal * normal, 0) / width)
        if mean_ptr is not None:
            dx -= tl.sum(dnormal, 0) / width
        dx = ds + dx * rstd
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), inside)
        dweight += dn * normal
        dbias += dn
        dx_sum += dx
    # Partial sums instead of atomics: `add_parts` adds them in a fixed order.
    sums = sums_ptr + tl.program_id(0) * 3 * width + columns
    tl.store(sums, dweight, inside)
    tl.store(sums + width, dbias, inside)
    tl.store(sums + 2 * width, dx_sum, inside)


def layer_norm_bwd(
    ds: Tensor, dn: Tensor, s: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Total gradient of s, and sums over its rows.

    Args:
        ds, dn: (N, C), contiguous, gradients of s itself and of its normalisation.
        s: (N, C), contiguous.
        mean, rstd: (N,), of the rows of s: the mean (None for an RMSNorm), and 1 / standard
            deviation or 1 / root mean square.
        weight: (C,).

    Returns:
        The gradient, (N, C) in the dtype of s, and sums (3, C) fp32: of dn times the normalised s,
        of dn, and of the gradient before it is rounded.
    """
    n_rows, width = s.shape
    dx = torch.empty_like(s)
    # Triton's interpreter counts as one SM.
    n_sms = torch.cuda.get_device_properties(s.device).multi_processor_count if s.is_cuda else 1
    n_programs = min(n_rows, PROGRAMS_PER_SM * n_sms)
    sums = s.new_empty(n_programs, 3, width, dtype=torch.float32)
    block = triton.next_power_of_2(width)
    # A stage of the pipeline holds a row of ds, dn and s each: of wide rows, fewer stages fit.
    n_prefetched = MAX_PREFETCH // (3 * block * s.element_size())
    layer_norm_bwd_kernel[(n_programs,)](
        ds, dn, s, mean, rstd, weight, dx, sums, n_rows, width,
        BLOCK_C=block, NUM_STAGES=min(1 + n_prefetched, NUM_STAGES),
        num_warps=max(1, min(16, block // COLUMNS_PER_WARP)), enable_fp_fusion=True,
    )  # fmt: skip
    return dx, add_parts(sums.flatten(1)).view(3, width)
