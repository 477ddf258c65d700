"""A linear layer and a GELU, and their gradients, in plain PyTorch: what the kernels must give."""

import torch
from torch import Tensor
from torch.nn import functional as F


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """h = x @ weight.T and gelu(h + bias), in the tanh form.

    Args:
        x, weight: (N, C) and (F, C) of one dtype, that of what is returned.
        bias: (F,), perhaps of another dtype; None: 0.

    Returns:
        (N, F) twice.
    """
    h = x @ weight.T
    return h, bias_gelu(h, bias)


def linear_gelu_bwd(
    dy: Tensor, weight: Tensor, h: Tensor, bias: Tensor | None, recompute: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients of h and the bias where dy @ weight is that of the GELU.

    Args:
        dy, weight, h: (N, C), (C, F) and (N, F) of one dtype; bias: (F,) or None.
        recompute: give the GELU, too.
    """
    return bias_gelu_bwd(dy @ weight, h, bias, recompute)


def bias_gelu(h: Tensor, bias: Tensor | None) -> Tensor:
    """gelu(h + bias), in the tanh form, for (N, F) and (F,) or None; in the dtype of h."""
    return F.gelu(_sum(h, bias), approximate="tanh").to(h.dtype)


def bias_gelu_bwd(
    dg: Tensor, h: Tensor, bias: Tensor | None, recompute: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients of h and the bias, and what `bias_gelu` gave, if it is asked for.

    Args:
        dg, h: (N, F) of one dtype.
        bias: (F,) or None.
        recompute: give the GELU, too.
    """
    x = _sum(h, bias)
    dx = torch.ops.aten.gelu_backward(dg.to(x.dtype), x, approximate="tanh")
    again = bias_gelu(h, bias) if recompute else None
    return dx.to(h.dtype), None if bias is None else dx.sum(0).to(bias.dtype), again


def _sum(h: Tensor, bias: Tensor | None) -> Tensor:
    """In at least fp32."""
    dtype = torch.promote_types(h.dtype, torch.float32)
    return h.to(dtype) if bias is None else h.to(dtype) + bias.to(dtype)
