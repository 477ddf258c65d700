"""A linear layer with a GELU, and its gradients, in PyTorch: the reference for the kernels."""

import torch
from torch import Tensor
from torch.nn import functional as F


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute h = x @ weight.T and gelu(h + bias), in the tanh form.

    Args:
        x, weight: (N, C) and (F, C) in one dtype, which the results have as well.
        bias: (F,), possibly in another dtype; None: 0.

    Returns:
        (N, F) twice.
    """
    h = x @ weight.T
    return h, F.gelu(_add(h, bias), approximate="tanh").to(h.dtype)


def linear_gelu_bwd(
    dy: Tensor, weight: Tensor, h: Tensor, bias: Tensor | None, recompute: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of h and the bias, given that dy @ weight is the gradient of the GELU.

    Args:
        dy, weight, h: (N, C), (C, F) and (N, F) of one dtype.
        bias: (F,) or None.
        recompute: return the GELU as well; otherwise None in its place.
    """
    x = _add(h, bias)
    dx = torch.ops.aten.gelu_backward((dy @ weight).to(x.dtype), x, approximate="tanh")
    g_again = F.gelu(x, approximate="tanh").to(h.dtype) if recompute else None
    return dx.to(h.dtype), None if bias is None else dx.sum(0).to(bias.dtype), g_again


def _add(h: Tensor, bias: Tensor | None) -> Tensor:
    """Add h and bias in at least fp32."""
    dtype = torch.promote_types(h.dtype, torch.float32)
    return h.to(dtype) if bias is None else h.to(dtype) + bias.to(dtype)
