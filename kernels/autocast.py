"""Casts to the dtype of autocast, for operators that compute in it."""

import torch
from torch import Tensor


def in_autocast_dtypes(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast tensors of one device with `in_autocast_dtype`."""
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    return tuple([in_autocast_dtype(x) for x in tensors])


def in_autocast_dtype(x: Tensor) -> Tensor:
    """Cast x to the dtype of autocast, if it is on; fp64 and meta tensors stay, as in PyTorch."""
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return x
    if x.dtype == torch.float64 or not x.is_floating_point():
        return x
    return cast(x, torch.get_autocast_dtype(device))


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast x to dtype, or return x itself, without an operator, if it has that dtype.

    Outputs of an `autograd.Function` need this: under torch.compile (PyTorch 2.11), a `to` that
    changes nothing leaves such an output without a gradient.
    """
    return x if x.dtype == dtype else x.to(dtype)
