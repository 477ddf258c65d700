"""What the operators of a training step beside attention share: who computes, in which dtype."""

import importlib
from types import ModuleType

import torch
from torch import Tensor

from kernels import triton

IMPLS = ("triton", "reference")
"""Kernels for a GPU, and PyTorch anywhere: also the names of their folders."""


def pick(impl: str | None, x: Tensor, name: str) -> str:
    """The implementation to use: the one asked for if it can serve x, or the fastest that can.

    Args:
        impl: what was asked for; None leaves it open.
        x: the tensor whose device and dtype decide.
        name: what messages call it.

    Raises:
        ValueError: there is no such implementation, or it cannot serve x.
    """
    obstacle = triton.device_obstacle(x, name)
    if impl is None:
        # as attention: interpreted kernels are right, but far too slow to be picked
        return "triton" if x.is_cuda and obstacle is None else "reference"
    if impl not in IMPLS:
        raise ValueError(f"impl must be None or one of {IMPLS}, got {impl!r}")
    if impl == "triton" and obstacle is not None:
        raise ValueError(f"impl='triton' cannot serve this call: {obstacle}. impl=None picks")
    return impl


def module_of(impl: str, name: str) -> ModuleType:
    """kernels/IMPL/NAME.py, imported when first used: Triton need not be there."""
    return importlib.import_module(f"kernels.{impl}.{name}")


def in_autocast_dtype(x: Tensor) -> Tensor:
    """x as autocast gives it to a linear layer; x itself where autocast is off."""
    if not torch.is_autocast_enabled(x.device.type) or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))
