"""What the operators of a training step beside attention share: who computes, in which dtype."""

import importlib
from types import ModuleType

import torch
from torch import Tensor


def pick(impl: str | None, x: Tensor, obstacles: dict[str, str | None]) -> str:
    """The implementation to use: the one asked for if it can serve a call, or the fastest that can.

    Args:
        impl: what was asked for; None leaves it open.
        x: a tensor of the call.
        obstacles: of each implementation, from the fastest to "reference", which is PyTorch and
            serves all: why it cannot serve the call, None if it can. Their names are those of
            folders.

    Raises:
        ValueError: there is no such implementation, or it cannot serve the call.
    """
    if impl is None:
        if not x.is_cuda:
            # as attention: interpreted kernels are right, but far too slow to be picked
            return "reference"
        return next(name for name, obstacle in obstacles.items() if obstacle is None)
    if not isinstance(impl, str) or impl not in obstacles:
        raise ValueError(f"impl must be None or one of {tuple(obstacles)}, got {impl!r}")
    obstacle = obstacles[impl]
    if obstacle is not None:
        raise ValueError(f"impl={impl!r} cannot serve this call: {obstacle}. impl=None picks")
    return impl


def module_of(impl: str, name: str) -> ModuleType:
    """kernels/IMPL/NAME.py, imported when first used: Triton need not be there."""
    return importlib.import_module(f".{impl}.{name}", __package__)


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
