"""Choice of an implementation for the fused operators."""

import importlib
from types import ModuleType

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
    """kernels/fused/IMPL/NAME.py, imported when first used: Triton need not be there."""
    return importlib.import_module(f".{impl}.{name}", __package__)
