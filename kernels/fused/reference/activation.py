"""A linear layer with an activation, and its gradients: the reference for the kernels."""

import torch
from torch import Tensor
from torch.nn import functional as F


def linear_activation(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str
) -> tuple[Tensor, Tensor]:
    """Compute h = x @ weight.T and activation(h + bias).

    Args:
        x, weight: (N, C) and (F, C) in one dtype, which the results have as well.
        bias: (F,), possibly in another dtype; None: 0.
        activation: "gelu", in the tanh form, or "relu_squared".

    Returns:
        (N, F) twice.
    """
    h = x @ weight.T
    return h, _activate(_add(h, bias), activation).to(h.dtype)


def linear_activation_bwd(
    dy: Tensor, weight: Tensor, h: Tensor, bias: Tensor | None, activation: str, recompute: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of h and the bias, given that dy @ weight is the gradient of the activation.

    Args:
        dy, weight, h: (N, C), (C, F) and (N, F) of one dtype.
        bias: (F,) or None.
        activation: as in `linear_activation`.
        recompute: return the activation as well; otherwise None in its place.
    """
    x = _add(h, bias)
    dg = (dy @ weight).to(x.dtype)
    if activation == "gelu":
        dx = torch.ops.aten.gelu_backward(dg, x, approximate="tanh")
    else:
        dx = dg * (2 * F.relu(x))
    g_again = _activate(x, activation).to(h.dtype) if recompute else None
    return dx.to(h.dtype), None if bias is None else dx.sum(0).to(bias.dtype), g_again


def _activate(x: Tensor, activation: str) -> Tensor:
    if activation == "gelu":
        return F.gelu(x, approximate="tanh")
    return F.relu(x).square()


def _add(h: Tensor, bias: Tensor | None) -> Tensor:
    """Add h and bias in at least fp32."""
    dtype = torch.promote_types(h.dtype, torch.float32)
    return h.to(dtype) if bias is None else h.to(dtype) + bias.to(dtype)
