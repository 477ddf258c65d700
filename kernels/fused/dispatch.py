"""Selection of an implementation for the fused operators."""

import importlib
from types import ModuleType

from torch import Tensor


def select_impl(impl: str | None, x: Tensor, **unsupported_reasons: str | None) -> str:
    """Select the requested implementation, or the fastest one that serves the call.

    Args:
        impl: the requested implementation; None selects one.
        x: a tensor of the call.
        unsupported_reasons: why each implementation with kernels cannot serve the call, or None if
            it can; the fastest comes first. "reference" (PyTorch) serves all calls.

    Raises:
        ValueError: there is no such implementation, or it cannot serve the call.
    """
    reasons = {**unsupported_reasons, "reference": None}
    if impl is None:
        # Interpreted kernels give the same results, but are far too slow to be the default.
        supported = (name for name, reason in reasons.items() if reason is None)
        return next(supported) if x.is_cuda else "reference"
    if not isinstance(impl, str) or impl not in reasons:
        raise ValueError(f"impl must be None or one of {tuple(reasons)}, got {impl!r}")
    if reasons[impl] is not None:
        raise ValueError(
            f"impl={impl!r} cannot serve this call: {reasons[impl]}. impl=None picks one that can"
        )
    return impl


def module_of(impl: str, name: str) -> ModuleType:
    """Import the module `name` of an implementation on first use, because Triton may be missing.

    Modules for Hopper are epilogues of matrix products, in kernels/hopper/gemm.
    """
    folder = "..hopper.gemm" if impl == "hopper" else f".{impl}"
    return importlib.import_module(f"{folder}.{name}", __package__)
