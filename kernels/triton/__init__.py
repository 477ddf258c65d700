"""The portable kernels: Ampere and later, and Triton's interpreter.

Importing this needs neither a GPU nor Triton; fwd.py and bwd.py are imported by the first call.
"""

import importlib.util
import os

import torch
from torch import Tensor

from ..checks import MAX_ROW_STRIDE, rows_in_reach
from ..options import AttentionOptions
from ..transforms import active_transform

# Both are read once: Triton itself looks at TRITON_INTERPRET when a kernel is defined, and
# torch.compile can trace neither look-up.
_HAS_TRITON = importlib.util.find_spec("triton") is not None
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def is_interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on the CPU."""
    return _INTERPRETED


def unsupported_device(x: Tensor, name: str) -> str | None:
    """Reason why no Triton kernel can serve a call with this tensor, or None."""
    if not _HAS_TRITON:
        return "the package triton is not installed"
    if x.dtype == torch.float64:
        return f"it computes in fp32, and {name} is float64"
    if x.device.type != "cuda" and not _INTERPRETED:
        return (
            f"{name} is on {x.device}, and it needs a CUDA GPU (or TRITON_INTERPRET=1, for tests)"
        )
    return None


def unsupported_transform() -> str | None:
    """Reason why an `autograd.Function` cannot serve the call, or None."""
    transform = active_transform()
    return None if transform is None else f"it does not support {transform}"


def unsupported_reason(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> str | None:
    """Reason why the attention kernels cannot serve the call, or None. They support all options."""
    reason = unsupported_device(q, "q") or unsupported_transform()
    if reason is not None:
        return reason
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not rows_in_reach(tensor):
            return (
                f"it takes rows at most {MAX_ROW_STRIDE} elements apart, and {name} has shape "
                f"{tuple(tensor.shape)} and strides {tensor.stride()}: call .contiguous() on it"
            )
    return None
