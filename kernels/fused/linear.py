"""`linear`: a linear layer whose weight gradient is never rounded to the dtype of activations.

PyTorch's autocast casts the weight at each use and rounds its gradient. Here, casts can be cached
(`kernels.fused.cast_cache`), and the matrix product writes the gradient in the weight's dtype.

Shapes: N rows, C input width, F output width.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..argument_types import check_tensor, check_tensors
from ..autocast import in_autocast_dtype
from ..registration import not_differentiable, operator
from ..transforms import refuse_derivatives
from .cast_cache import cast_weight
from .matmul import matmul


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Linear layer, x @ weight.T + bias, whose weight gradient is not rounded to the dtype of x.

    Args:
        x: (..., C), floating-point. The product is in its dtype, or that of autocast.
        weight, bias: (F, C) and (F,), floating-point; their gradients have their dtypes.

    Returns:
        (..., F) in the dtype of the product.

    Raises:
        ValueError: an argument is malformed.
    """
    refuse_derivatives("kernels.linear", "torch.nn.functional.linear")
    check_tensors(x=x, weight=weight)
    check_tensor("bias", bias, or_none=True)
    x = in_autocast_dtype(x)
    fits = x.dim() >= 1 and weight.dim() == 2 and x.shape[-1] == weight.shape[1]
    if not fits or (bias is not None and bias.shape != weight.shape[:1]):
        bias_shape = None if bias is None else tuple(bias.shape)
        raise ValueError(
            "x must be (..., C), weight (F, C) and bias (F,) or None, got "
            f"{tuple(x.shape)}, {tuple(weight.shape)} and {bias_shape}"
        )
    tensors = (x, weight) if bias is None else (x, weight, bias)
    if not all(t.is_floating_point() and t.device == x.device for t in tensors):
        kinds = ", ".join(f"{t.dtype} on {t.device}" for t in tensors)
        raise ValueError(
            f"x, weight and bias must be floating-point and on one device, got {kinds}"
        )
    # Without gradients, call the function: an operator costs more CPU time than a small product.
    as_operator = torch.is_grad_enabled() or torch.compiler.is_compiling()
    function = torch.ops.papilio.linear if as_operator else _linear
    y = function(x.reshape(-1, x.shape[-1]), weight, bias)
    return y.view(*x.shape[:-1], weight.shape[0])


def _setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, weight, bias = inputs
    ctx.save_for_backward(x, weight)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    dx, dweight = torch.ops.papilio.linear_bwd(dy, *ctx.saved_tensors)
    if ctx.bias_dtype is None:
        return dx, dweight, None
    # The sum is not part of the operator, so that torch.compile can fuse it.
    wide = torch.promote_types(ctx.bias_dtype, torch.float32)
    return dx, dweight, dy.sum(0, dtype=wide).to(ctx.bias_dtype)


@operator(
    "linear",
    fake=lambda x, weight, bias: x.new_empty(x.shape[0], weight.shape[0]),
    setup_context=_setup_context,
    backward=_backward,
    flops=lambda x, weight, bias: 2 * x[0] * weight[0] * weight[1],
)
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(x, cast_weight(weight, x.dtype), None if bias is None else bias.to(x.dtype))


@operator(
    "linear_bwd",
    fake=lambda dy, x, weight: (x.new_empty(x.shape), weight.new_empty(weight.shape)),
    backward=not_differentiable("linear has no second derivative: use torch.nn.functional.linear"),
    flops=lambda dy, x, weight: 4 * x[0] * weight[0] * weight[1],
)
def _linear_bwd(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and the weight."""
    with torch.autocast(x.device.type, enabled=False):
        return dy @ cast_weight(weight, x.dtype), matmul(dy.T, x, weight.dtype)
