"""`linear`: a linear layer whose weight's gradient is never rounded to the dtype of activations.

Under autocast PyTorch's casts the weight at each use, and rounds its gradient. Here the cast may be
kept (`kernels.fused.cast_cache`), and the gradient leaves the product as it is.

Shapes: N rows, C width of the input, F of the output.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

from ..argument_types import check_tensor, check_tensors
from ..autocast import in_autocast_dtype
from ..transforms import refuse_derivatives
from .cast_cache import cast_weight
from .matmul import product


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias, as `torch.nn.functional.linear`, with cuBLAS's products on a GPU.

    Args:
        x: (..., C), floating; the product is in its dtype, or in that of autocast.
        weight, bias: (F, C) and (F,), floating; their gradients have their dtypes.

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
        of_bias = None if bias is None else tuple(bias.shape)
        raise ValueError(
            "x must be (..., C), weight (F, C) and bias (F,) or None, got "
            f"{tuple(x.shape)}, {tuple(weight.shape)} and {of_bias}"
        )
    given = (x, weight) if bias is None else (x, weight, bias)
    if not all(t.is_floating_point() and t.device == x.device for t in given):
        found = ", ".join(f"{t.dtype} on {t.device}" for t in given)
        raise ValueError(
            f"x, weight and bias must be floating-point and on one device, got {found}"
        )
    # a call of the operator costs the CPU more time than a small product
    as_operator = torch.is_grad_enabled() or torch.compiler.is_compiling()
    product_of = torch.ops.papilio.linear if as_operator else _forward
    y = product_of(x.reshape(-1, x.shape[-1]), weight, bias)
    return y.view(*x.shape[:-1], weight.shape[0])


torch.library.define("papilio::linear", "(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
torch.library.define(
    "papilio::linear_bwd", "(Tensor dy, Tensor x, Tensor weight) -> (Tensor, Tensor)"
)


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(x, cast_weight(weight, x.dtype), None if bias is None else bias.to(x.dtype))


torch.library.impl("papilio::linear", "CompositeExplicitAutograd", _forward)


@torch.library.register_fake("papilio::linear")
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@torch.library.impl("papilio::linear_bwd", "CompositeExplicitAutograd")
def _backward(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the weight."""
    with torch.autocast(x.device.type, enabled=False):
        return dy @ cast_weight(weight, x.dtype), product(dy.T, x, weight.dtype)


@torch.library.register_fake("papilio::linear_bwd")
def _(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, weight, bias = inputs
    ctx.save_for_backward(x, weight)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    dx, dweight = torch.ops.papilio.linear_bwd(dy, *ctx.saved_tensors)
    if ctx.bias_dtype is None:
        return dx, dweight, None
    # left to torch.compile, which adds in fp32
    wide = torch.promote_types(ctx.bias_dtype, torch.float32)
    return dx, dweight, dy.sum(0, dtype=wide).to(ctx.bias_dtype)


def _gradients_of_gradients(ctx: Any, *grads: Any) -> None:
    raise RuntimeError("linear has no second derivative: torch.nn.functional.linear has one")


torch.library.register_autograd("papilio::linear", _gradients, setup_context=_setup_context)
torch.library.register_autograd("papilio::linear_bwd", _gradients_of_gradients)


@register_flop_formula(torch.ops.papilio.linear)
def _flops(x_shape: tuple, weight_shape: tuple, *_: Any, **__: Any) -> int:
    """One product of (N, C) and (F, C)."""
    return 2 * x_shape[0] * weight_shape[0] * weight_shape[1]


@register_flop_formula(torch.ops.papilio.linear_bwd)
def _flops_of_backward(
    dy_shape: tuple, x_shape: tuple, weight_shape: tuple, *_: Any, **__: Any
) -> int:
    """Two of them."""
    return 2 * _flops(x_shape, weight_shape)
