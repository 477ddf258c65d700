"""Residual addition and normalisation: `add_layer_norm` and `add_rms_norm`.

The forward pass is PyTorch's, which torch.compile fuses. The backward pass is one kernel: the
gradient of the normalisation plus that of the stream, and three sums over all rows.

Shapes: N rows, C width of the stream.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import triton
from ..argument_types import check_number, check_tensor, check_tensors
from ..autocast import cast, in_autocast_dtype
from ..registration import operator
from .dispatch import module_of, select_impl


def add_layer_norm(
    x: Tensor, y: Tensor | None, bias: Tensor | None, weight: Tensor, norm_bias: Tensor | None,
    *, eps: float = 1e-5, impl: str | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Residual sum s = x + (y + bias), and the LayerNorm of s over its last dimension.

    Sums over rows accumulate in fp32, and repeated calls give the same bits.

    Args:
        x: (..., C), the stream. All tensors are floating-point; dtypes may differ, but either all
            are fp64 or none is.
        y: (..., C), the output of a layer, added to x; None for 0.
        bias: (C,), added to y; None for 0.
        weight, norm_bias: (C,) each, of the normalisation; norm_bias may be None, for 0.
        eps: added to the variance; at least 0.
        impl: "triton" (a kernel for the backward pass, on a GPU) or "reference" (PyTorch, any
            device); None picks.

    Returns:
        s in the dtype to which x and y promote, and its normalisation, computed in fp32 or wider,
        in the dtype of s or in that of autocast.

    Raises:
        ValueError: an argument is malformed, or the named impl cannot serve the call.

    Source: Ba et al. 2016, "Layer Normalization" (arXiv 1607.06450).
    """
    _check(x, y, bias, weight, norm_bias, eps)
    return _add_norm(x, y, bias, weight, norm_bias, eps, impl, center=True)


def add_rms_norm(
    x: Tensor, y: Tensor | None, bias: Tensor | None, weight: Tensor,
    *, eps: float = 1e-6, impl: str | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Residual sum s = x + (y + bias), and the RMSNorm of s: s / sqrt(mean(s^2) + eps) * weight.

    Arguments, results and errors are those of `add_layer_norm`; eps is added to the mean square.

    Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization" (arXiv 1910.07467).
    """
    _check(x, y, bias, weight, None, eps)
    return _add_norm(x, y, bias, weight, None, eps, impl, center=False)


def _add_norm(
    x: Tensor, y: Tensor | None, bias: Tensor | None, weight: Tensor, norm_bias: Tensor | None,
    eps: float, impl: str | None, *, center: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """LayerNorm with `center`, else RMSNorm."""
    reason = triton.unsupported_device(x, "x") or triton.unsupported_transform()
    # There is a kernel for the backward pass only.
    needs_kernel = torch.is_grad_enabled() and x.numel() > 0
    if select_impl(impl, x, triton=reason) == "triton" and needs_kernel:
        return _AddNorm.apply(x, y, bias, weight, norm_bias, eps, center)
    s = add_branch(x, y, bias)
    inputs = s, weight, norm_bias
    if s.dtype != weight.dtype or (norm_bias is not None and norm_bias.dtype != s.dtype):
        inputs = _widen(*inputs)
    s_wide, weight, norm_bias = inputs
    if center:
        normal = F.layer_norm(s_wide, weight.shape, weight, norm_bias, eps)
    else:
        normal = F.rms_norm(s_wide, weight.shape, weight, eps)
    return s, in_autocast_dtype(cast(normal, s.dtype))


def _check(
    x: Tensor, y: Tensor | None, bias: Tensor | None,
    weight: Tensor, norm_bias: Tensor | None, eps: float,
) -> None:  # fmt: skip
    check_tensors(x=x, weight=weight)
    for name, tensor in (("y", y), ("bias", bias), ("norm_bias", norm_bias)):
        check_tensor(name, tensor, or_none=True)
    check_number("eps", eps)
    if not 0 <= eps < math.inf:
        raise ValueError(f"eps must be a finite number of at least 0, got {eps}")
    if y is not None and y.shape != x.shape:
        raise ValueError(f"y must have the shape of x, {tuple(x.shape)}, got {tuple(y.shape)}")
    if bias is not None and y is None:
        raise ValueError("bias is added to y, and y is None: pass y, or no bias")
    if x.dim() == 0:
        raise ValueError("x must be (..., C), got a scalar")
    vectors = {"bias": bias, "weight": weight, "norm_bias": norm_bias}
    for name, vector in vectors.items():
        if vector is not None and vector.shape != x.shape[-1:]:
            expected = f"({x.shape[-1]},) to match x {tuple(x.shape)}"
            raise ValueError(f"{name} must be {expected}, got {tuple(vector.shape)}")
    tensors = {name: t for name, t in {"x": x, "y": y, **vectors}.items() if t is not None}
    floating = all(t.is_floating_point() for t in tensors.values())
    n_double = sum(t.dtype == torch.float64 for t in tensors.values())
    if not floating or n_double not in (0, len(tensors)):
        dtypes = ", ".join(f"{name} in {t.dtype}" for name, t in tensors.items())
        raise ValueError(
            f"dtypes must be floating-point, and all or none float64, got {dtypes}: convert with "
            ".to(dtype)"
        )
    if any(t.device != x.device for t in tensors.values()):
        devices = ", ".join(f"{name} on {t.device}" for name, t in tensors.items())
        raise ValueError(f"all must be on one device, got {devices}")


def add_branch(x: Tensor, y: Tensor | None, bias: Tensor | None) -> Tensor:
    """x + (y + bias), where y and bias may be None, as in `add_layer_norm`."""
    return x if y is None else x + add_bias(y, bias)


def add_bias(y: Tensor, bias: Tensor | None) -> Tensor:
    """y + bias in the dtype of y."""
    return y if bias is None else y + cast(bias, y.dtype)


def _widen(
    s: Tensor, weight: Tensor, norm_bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cast the inputs of a normalisation to fp32, or keep them in fp64."""
    wide = torch.promote_types(s.dtype, torch.float32)
    return cast(s, wide), cast(weight, wide), None if norm_bias is None else cast(norm_bias, wide)


class _AddNorm(torch.autograd.Function):
    """Forward pass by PyTorch, which torch.compile can trace, and backward pass by one kernel."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor | None, bias: Tensor | None,
        weight: Tensor, norm_bias: Tensor | None, eps: float, center: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        s = add_branch(x, y, bias)
        s_wide, weight_wide, bias_wide = _widen(s, weight, norm_bias)
        mean: Tensor | None = None
        if center:
            normal, mean, rstd = torch.native_layer_norm(
                s_wide, weight.shape, weight_wide, bias_wide, eps
            )
        else:
            rstd = torch.rsqrt(s_wide.square().mean(-1, keepdim=True) + eps)
            normal = s_wide * rstd * weight_wide
        ctx.save_for_backward(s, mean, rstd, weight)
        ctx.dtypes = [None if t is None else t.dtype for t in (x, y, bias, norm_bias)]
        # Without y, s is x itself, and an autograd.Function must not return its input: make a view.
        return (s.view_as(s) if y is None else s), in_autocast_dtype(cast(normal, s.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_dtype, y_dtype, bias_dtype, norm_bias_dtype = ctx.dtypes
        s, mean, rstd, weight = ctx.saved_tensors
        dx, sums = torch.ops.papilio.layer_norm_bwd(*grads, s, mean, rstd, weight)
        dy = None if y_dtype is None else dx.to(y_dtype)
        dbias = None if bias_dtype is None else sums[2].to(bias_dtype)
        dnorm_bias = None if norm_bias_dtype is None else sums[1].to(norm_bias_dtype)
        return dx.to(x_dtype), dy, dbias, sums[0].to(weight.dtype), dnorm_bias, None, None


def _fake(ds, dn, s, mean, rstd, weight):
    return s.new_empty(s.shape), s.new_empty(3, s.shape[-1], dtype=torch.float32)


@operator("layer_norm_bwd", fake=_fake)
def _layer_norm_bwd(
    ds: Tensor, dn: Tensor, s: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradient of s, in its shape and dtype, and three sums over rows, (3, C) fp32.

    The sums are the gradients of the normalisation's weight and bias, and the sum of the gradient
    of s. Without `mean`, the normalisation is an RMSNorm.
    """
    width = s.shape[-1]
    with torch.cuda.device_of(s):
        rows = [t.contiguous().view(-1, width) for t in (ds, dn, s)]
        dx, sums = module_of("triton", "layer_norm").layer_norm_bwd(
            *rows, None if mean is None else mean.flatten(), rstd.flatten(), weight.contiguous()
        )
    return dx.view(s.shape), sums
