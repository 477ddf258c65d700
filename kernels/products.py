"""Matrix products whose result is of higher precision than their factors."""

import torch
from torch import Tensor


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b in `dtype`, never rounded to that of a and b on the way.

    Args:
        a, b: (M, K) and (K, N) of one dtype.
        dtype: that one, or a wider one.
    """
    if dtype == a.dtype:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, as `product` in the dtype of `total`, (M, N)."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
