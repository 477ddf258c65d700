"""Matrix products whose result is of higher precision than their factors."""

import torch
from torch import Tensor


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b in `dtype`; where it is wider than that of a and b, never rounded to theirs on the way.

    Args:
        a, b: (M, K) and (K, N) of one dtype.
        dtype: of the result.
    """
    wide = torch.promote_types(a.dtype, dtype)
    if wide == a.dtype:
        return (a @ b).to(dtype)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=wide).to(dtype)
    return (a.to(wide) @ b.to(wide)).to(dtype)


def add_product(total: Tensor, a: Tensor, b: Tensor, *, keep: bool = True) -> None:
    """total += a @ b for a total (M, N) in the dtype of a and b, or in a wider one.

    Args:
        keep: whether the total is added to; otherwise what it holds, be it NaN, is overwritten.
    """
    beta = int(keep)
    if total.dtype == a.dtype:
        total.addmm_(a, b, beta=beta)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, beta=beta, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype), beta=beta)
