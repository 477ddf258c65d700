"""In which dtype activations are computed; weights are always float32."""

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch

Dtype = Literal["bfloat16", "float32"]


def autocast(dtype: Dtype, device: torch.device) -> AbstractContextManager:
    """The context for a forward pass whose activations and matrix products are in `dtype`."""
    if dtype == "float32":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)
