"""Casts to the dtype of autocast, for operators that compute in it."""

import torch
from torch import Tensor


def in_autocast_dtypes(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors of one device as `in_autocast_dtype` casts them."""
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    return tuple([in_autocast_dtype(x) for x in tensors])


def in_autocast_dtype(x: Tensor) -> Tensor:
    """x in the dtype of autocast, where it is on; fp64 and meta tensors stay, as in PyTorch."""
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return x
    if x.dtype == torch.float64 or not x.is_floating_point():
        return x
    return cast(x, torch.get_autocast_dtype(device))


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in dtype: x itself, and no operator, where that is its dtype.

    For what an `autograd.Function` returns: compiled by PyTorch 2.11, a `to` there that changes
    nothing leaves the output without a gradient.
    """
    return x if x.dtype == dtype else x.to(dtype)
