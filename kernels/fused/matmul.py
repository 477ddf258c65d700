"""Matrix products whose result has a higher precision than their operands."""

import torch
from torch import Tensor


def matmul(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute a @ b in `dtype`, without an intermediate rounding to the dtype of a and b.

    Args:
        a, b: (M, K) and (K, N) of one dtype.
    """
    wide = torch.promote_types(a.dtype, dtype)
    if wide == a.dtype:
        return (a @ b).to(dtype)
    # Only CUDA has products with a wider output: cuBLAS accumulates in fp32 in any case. Elsewhere,
    # the operands are widened.
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=wide).to(dtype)
    return (a.to(wide) @ b.to(wide)).to(dtype)


def addmm_(total: Tensor, a: Tensor, b: Tensor, *, accumulate: bool = True) -> None:
    """Add a @ b to `total` (M, N), which has the dtype of a and b or a wider one.

    Args:
        accumulate: False overwrites `total`, even where it holds NaN.
    """
    beta = int(accumulate)
    if total.dtype == a.dtype:
        total.addmm_(a, b, beta=beta)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, beta=beta, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype), beta=beta)
