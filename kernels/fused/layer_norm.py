"""`add_layer_norm`: what a layer adds to the residual stream, and the LayerNorm of the next one.

Forward is PyTorch's, which torch.compile fuses. Backward is one pass over memory:
the gradient of the normalisation, the addition of that of the stream, and three sums over all rows,
for weight and bias of the normalisation and for the bias of the layer before it.

Shapes: N rows, C width of the stream.
"""

import math
from typing import Any, overload

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import triton
from ..argument_types import check_number, check_tensor, check_tensors
from ..autocast import cast, in_autocast_dtype
from ..registration import operator
from .dispatch import module_of, select_impl


def add_layer_norm(
    x: Tensor,
    y: Tensor | None,
    bias: Tensor | None,
    weight: Tensor,
    norm_bias: Tensor | None,
    *,
    eps: float = 1e-5,
    impl: str | None = None,
) -> tuple[Tensor, Tensor]:
    """s = x + (y + bias), and the LayerNorm of s over its last dimension.

    Sums over rows add up in fp32, and repeated calls give the same bits.

    Args:
        x: (..., C), the stream. All tensors are floating-point; dtypes may differ, but that all
            are fp64 or none is.
        y: (..., C): what a layer adds to it; None: nothing.
        bias: (C,), added to y; None: nothing.
        weight, norm_bias: (C,) each, of the normalisation; norm_bias may be None, for 0.
        eps: added to the variance; at least 0.
        impl: "triton" (backward by a kernel, on a GPU) or "reference" (PyTorch's, anywhere); None
            picks.

    Returns:
        s in the dtype to which x and y promote, and its normalisation, computed in fp32 or wider,
        in the dtype of s or in that of autocast.

    Raises:
        ValueError: an argument is malformed, or the named impl cannot serve the call.

    Source: Ba et al. 2016, "Layer Normalization" (arXiv 1607.06450).
    """
    check_tensors(x=x, weight=weight)
    for name, tensor in (("y", y), ("bias", bias), ("norm_bias", norm_bias)):
        check_tensor(name, tensor, or_none=True)
    check_number("eps", eps)
    if not 0 <= eps < math.inf:
        raise ValueError(f"eps must be a finite number of at least 0, got {eps}")
    _check(x, y, bias, weight, norm_bias)
    reason = triton.unsupported_device(x, "x") or triton.unsupported_transform()
    # The kernel serves the backward pass alone.
    needs_kernel = torch.is_grad_enabled() and x.numel() > 0
    if select_impl(impl, x, triton=reason) == "triton" and needs_kernel:
        return _AddLayerNorm.apply(x, y, bias, weight, norm_bias, eps)
    s = add_branch(x, y, bias)
    if s.dtype == weight.dtype and (norm_bias is None or norm_bias.dtype == s.dtype):
        normal = F.layer_norm(s, weight.shape, weight, norm_bias, eps)
    else:
        normal = F.layer_norm(_wide(s), weight.shape, _wide(weight), _wide(norm_bias), eps)
    return s, in_autocast_dtype(cast(normal, s.dtype))


def _check(
    x: Tensor, y: Tensor | None, bias: Tensor | None, weight: Tensor, norm_bias: Tensor | None
) -> None:
    if y is not None and y.shape != x.shape:
        raise ValueError(f"y must be as x, {tuple(x.shape)}, got {tuple(y.shape)}")
    if bias is not None and y is None:
        raise ValueError("bias is added to y, and y is None: pass y, or no bias")
    if x.dim() == 0:
        raise ValueError("x must be (..., C), got a scalar")
    width = x.shape[-1]
    for name, of_width in (("bias", bias), ("weight", weight), ("norm_bias", norm_bias)):
        if of_width is not None and of_width.shape != (width,):
            raise ValueError(
                f"{name} must be ({width},), as x is {tuple(x.shape)}, got {tuple(of_width.shape)}"
            )
    given = {"x": x, "y": y, "bias": bias, "weight": weight, "norm_bias": norm_bias}
    found = {name: tensor for name, tensor in given.items() if tensor is not None}
    n_double = sum(tensor.dtype == torch.float64 for tensor in found.values())
    if n_double not in (0, len(found)) or not all(t.is_floating_point() for t in found.values()):
        dtypes = ", ".join(f"{name} in {tensor.dtype}" for name, tensor in found.items())
        raise ValueError(
            f"dtypes must be floating-point, and all or none float64, got {dtypes}: convert with "
            ".to(dtype)"
        )
    if any(tensor.device != x.device for tensor in found.values()):
        devices = ", ".join(f"{name} on {tensor.device}" for name, tensor in found.items())
        raise ValueError(f"all must be on one device, got {devices}")


def add_branch(x: Tensor, y: Tensor | None, bias: Tensor | None) -> Tensor:
    """x + (y + bias), or less where one is None, as in `add_layer_norm`."""
    return x if y is None else x + add_bias(y, bias)


def add_bias(y: Tensor, bias: Tensor | None) -> Tensor:
    """y + bias in the dtype of y."""
    return y if bias is None else y + cast(bias, y.dtype)


@overload
def _wide(x: Tensor) -> Tensor: ...
@overload
def _wide(x: None) -> None: ...
def _wide(x: Tensor | None) -> Tensor | None:
    """x in fp32, or in fp64 as it is."""
    if x is None:
        return None
    return cast(x, torch.promote_types(x.dtype, torch.float32))


class _AddLayerNorm(torch.autograd.Function):
    """PyTorch's forward, which torch.compile sees through, and a backward of one kernel."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        y: Tensor | None,
        bias: Tensor | None,
        weight: Tensor,
        norm_bias: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        s = add_branch(x, y, bias)
        normal, mean, rstd = torch.native_layer_norm(
            _wide(s), weight.shape, _wide(weight), _wide(norm_bias), eps
        )
        ctx.save_for_backward(s, mean, rstd, weight)
        ctx.dtypes = [None if t is None else t.dtype for t in (x, y, bias, norm_bias)]
        return (s.view_as(s) if y is None else s), in_autocast_dtype(cast(normal, s.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ds, dn = grads
        x_dtype, y_dtype, bias_dtype, norm_bias_dtype = ctx.dtypes
        s, mean, rstd, weight = ctx.saved_tensors
        dx, sums = torch.ops.papilio.layer_norm_bwd(ds, dn, s, mean, rstd, weight)
        return (
            dx.to(x_dtype),
            None if y_dtype is None else dx.to(y_dtype),
            None if bias_dtype is None else sums[2].to(bias_dtype),
            sums[0].to(weight.dtype),
            None if norm_bias_dtype is None else sums[1].to(norm_bias_dtype),
            None,
        )


def _fake(ds, dn, s, mean, rstd, weight):
    return s.new_empty(s.shape), s.new_empty(3, s.shape[-1], dtype=torch.float32)


@operator("layer_norm_bwd", fake=_fake)
def _backward(
    ds: Tensor, dn: Tensor, s: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient of s, as s, and sums over rows, (3, C) fp32: for weight and bias of the
    normalisation, and of the gradient itself."""
    width = s.shape[-1]
    with torch.cuda.device_of(s):
        dx, sums = module_of("triton", "layer_norm").layer_norm_bwd(
            *(t.contiguous().view(-1, width) for t in (ds, dn, s)),
            mean.flatten(),
            rstd.flatten(),
            weight.contiguous(),
        )
    return dx.view(s.shape), sums
