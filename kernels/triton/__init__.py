"""The portable kernels: Ampere and later, and Triton's interpreter.

Importing this needs neither a GPU nor Triton; fwd.py and bwd.py are imported by the first call.
"""

import importlib.util
import os

import torch

from kernels.call import AttentionCall
from kernels.checks import MAX_ROW_STRIDE, rows_in_reach

# Both are read once: Triton itself looks at TRITON_INTERPRET when a kernel is defined, and
# torch.compile can trace neither look-up.
_HAS_TRITON = importlib.util.find_spec("triton") is not None
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def obstacle(call: AttentionCall) -> str | None:
    """Why these kernels cannot serve the call, None if they can."""
    q = call.q
    if not _HAS_TRITON:
        return "the package triton is not installed"
    if q.dtype == torch.float64:
        return "it computes in fp32, and q is float64"
    if q.device.type != "cuda" and not _INTERPRETED:
        return f"q is on {q.device}, and it needs a CUDA GPU (or TRITON_INTERPRET=1, for tests)"
    for name, tensor in (("q", q), ("k", call.k), ("v", call.v)):
        if not rows_in_reach(tensor):
            return (
                f"it takes rows at most {MAX_ROW_STRIDE} elements apart, and {name} has shape "
                f"{tuple(tensor.shape)} and strides {tensor.stride()}: call .contiguous() on it"
            )
    return None
