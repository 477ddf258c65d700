"""The portable kernels: Ampere and later, and Triton's interpreter.

Importing this needs neither a GPU nor Triton; fwd.py and bwd.py are imported by the first call.
"""

import importlib.util
import os

import torch
from torch import Tensor

from ..call import AttentionCall
from ..checks import MAX_ROW_STRIDE, rows_in_reach
from ..transforms import active_transform

# Both are read once: Triton itself looks at TRITON_INTERPRET when a kernel is defined, and
# torch.compile can trace neither look-up.
_HAS_TRITON = importlib.util.find_spec("triton") is not None
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def is_interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on the CPU."""
    return _INTERPRETED


def device_obstacle(x: Tensor, name: str) -> str | None:
    """Why no kernel here can serve a call with this tensor, None if they can."""
    if not _HAS_TRITON:
        return "the package triton is not installed"
    if x.dtype == torch.float64:
        return f"it computes in fp32, and {name} is float64"
    if x.device.type != "cuda" and not _INTERPRETED:
        return (
            f"{name} is on {x.device}, and it needs a CUDA GPU (or TRITON_INTERPRET=1, for tests)"
        )
    return None


def transform_obstacle() -> str | None:
    """Why an `autograd.Function` of ours cannot serve a call, None if it can."""
    transform = active_transform()
    return None if transform is None else f"it does not support {transform}"


def obstacle(call: AttentionCall) -> str | None:
    """Why the attention kernels cannot serve the call, None if they can."""
    reason = device_obstacle(call.q, "q") or transform_obstacle()
    if reason is not None:
        return reason
    for name, tensor in (("q", call.q), ("k", call.k), ("v", call.v)):
        if not rows_in_reach(tensor):
            return (
                f"it takes rows at most {MAX_ROW_STRIDE} elements apart, and {name} has shape "
                f"{tuple(tensor.shape)} and strides {tensor.stride()}: call .contiguous() on it"
            )
    return None
