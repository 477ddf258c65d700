"""`gelu_mlp`: two linear layers with a GELU in between, the MLP of a Transformer block.

The work between the two matrix products is one fused step in each pass. Forward: the bias and the
GELU. Backward: the gradients of both, and optionally the GELU again, so that it need not be saved.
On H100 and H200, this step is the epilogue of the preceding product; elsewhere, it is a pass over
memory. cuBLAS computes the other products.

Shapes: N rows, C width of the residual stream, F width in between.
"""

from typing import Any

import torch
from torch import Tensor

from .. import hopper, triton
from ..argument_types import check_bool, check_tensor, check_tensors
from ..autocast import in_autocast_dtype
from ..registration import not_differentiable, operator
from ..transforms import refuse_derivatives
from .cast_cache import cast_weight
from .dispatch import module_of, select_impl
from .matmul import matmul


def gelu_mlp(
    x: Tensor, w_in: Tensor, b_in: Tensor | None, w_out: Tensor,
    *, recompute: bool = False, impl: str | None = None,
) -> Tensor:  # fmt: skip
    """MLP of GPT-2, gelu(x @ w_in.T + b_in) @ w_out.T, with the tanh form of the GELU.

    Matrix products are in the dtype of `x`, or that of autocast. The bias and the gradients of
    weights are never rounded to that dtype: they accumulate in fp32, or in fp64 for fp64. Repeated
    calls give the same bits.

    Args:
        x: (..., C), fp16, bf16, fp32 or fp64.
        w_in, b_in, w_out: (F, C), (F,) and (C, F) in one floating dtype, which their gradients
            have as well; b_in may be None, for 0.
        recompute: save one (N, F) tensor for the backward pass instead of two, and compute the
            GELU again there.
        impl: "hopper" (kernels for H100 and H200), "triton" (any GPU) or "reference" (PyTorch,
            any device); None picks.

    Returns:
        (..., C) in the dtype of the products, without the bias of the second layer: the caller
        adds it together with the residual stream (`add_layer_norm`).

    Raises:
        ValueError: an argument is malformed, or the named impl cannot serve the call.

    Source: Hendrycks and Gimpel 2016, "Gaussian Error Linear Units" (arXiv 1606.08415).
    """
    refuse_derivatives("gelu_mlp", "write it out in PyTorch")
    check_tensors(x=x, w_in=w_in, w_out=w_out)
    check_tensor("b_in", b_in, or_none=True)
    check_bool("recompute", recompute)
    x = in_autocast_dtype(x)
    _check(x, w_in, b_in, w_out)
    hopper_reason = hopper.unsupported_linear(x, w_in)
    impl = select_impl(impl, x, hopper=hopper_reason, triton=triton.unsupported_device(x, "x"))
    y, *_ = torch.ops.papilio.gelu_mlp(x.flatten(0, -2), w_in, b_in, w_out, recompute, impl)
    return y.view(x.shape)


def _check(x: Tensor, w_in: Tensor, b_in: Tensor | None, w_out: Tensor) -> None:
    width = w_in.shape[0] if w_in.dim() else 0
    if x.dim() < 2 or w_in.shape != (width, x.shape[-1]) or w_out.shape != (x.shape[-1], width):
        raise ValueError(
            "x must be (..., C), w_in (F, C) and w_out (C, F), got "
            f"{tuple(x.shape)}, {tuple(w_in.shape)} and {tuple(w_out.shape)}"
        )
    tensors = {"x": x, "w_in": w_in, "w_out": w_out}
    if b_in is not None:
        if b_in.shape != (width,):
            raise ValueError(f"b_in must be ({width},), the rows of w_in, got {tuple(b_in.shape)}")
        tensors["b_in"] = b_in
    one_dtype = all(t is x or t.dtype == w_in.dtype for t in tensors.values())
    if not (x.is_floating_point() and w_in.is_floating_point() and one_dtype):
        dtypes = ", ".join(f"{name} in {t.dtype}" for name, t in tensors.items())
        requirement = "floating-point, the weights of one dtype"
        raise ValueError(f"x and the weights must be {requirement}, got {dtypes}")
    if any(t.device != x.device for t in tensors.values()):
        devices = ", ".join(f"{name} on {t.device}" for name, t in tensors.items())
        raise ValueError(f"all must be on one device, got {devices}")


def _fake(x, w_in, b_in, w_out, recompute, impl):
    rows, width = x.shape[0], w_in.shape[0]
    # An operator cannot return None: a GELU that is not saved is a tensor of 0 rows.
    saved_rows = 0 if recompute else rows
    return x.new_empty(x.shape), x.new_empty(rows, width), x.new_empty(saved_rows, width)


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    x, w_in, b_in, w_out, _, ctx.impl = inputs
    ctx.save_for_backward(x, *output[1:], w_in, b_in, w_out)
    ctx.has_bias = b_in is not None
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 6
    dx, dw_in, db_in, dw_out = torch.ops.papilio.gelu_mlp_bwd(dy, *ctx.saved_tensors, ctx.impl)
    return dx, dw_in, db_in if ctx.has_bias else None, dw_out, None, None


@operator(
    "gelu_mlp",
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    flops=lambda x, w_in, *_: 4 * x[0] * w_in[0] * w_in[1],
)
def _gelu_mlp(
    x: Tensor, w_in: Tensor, b_in: Tensor | None, w_out: Tensor, recompute: bool, impl: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y (N, C), h (N, F), the first product without its bias, and g (N, F), the GELU.

    g is (0, F) if the backward pass computes it again.
    """
    # Autocast has set the dtype of x already, and must not change that of the products in here.
    with torch.cuda.device_of(x), torch.autocast(x.device.type, enabled=False):
        h, g = module_of(impl, "gelu").linear_gelu(x, cast_weight(w_in, x.dtype), b_in)
        y = g @ cast_weight(w_out, x.dtype).T
    return y, h, g.new_empty(0, g.shape[1]) if recompute else g


def _fake_bwd(dy, x, h, g, w_in, b_in, w_out, impl):
    db_in = x.new_empty(0) if b_in is None else b_in.new_empty(b_in.shape)
    return x.new_empty(x.shape), w_in.new_empty(w_in.shape), db_in, w_out.new_empty(w_out.shape)


@operator(
    "gelu_mlp_bwd",
    fake=_fake_bwd,
    backward=not_differentiable("gelu_mlp has no second derivative: write it out in PyTorch"),
    flops=lambda dy, x, h, *_: 8 * h[0] * h[1] * x[1],
)
def _gelu_mlp_bwd(
    dy: Tensor, x: Tensor, h: Tensor, g: Tensor,
    w_in: Tensor, b_in: Tensor | None, w_out: Tensor, impl: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, w_in, b_in and w_out, each in its dtype; (0,) for no b_in."""
    w_in_cast, w_out_cast = cast_weight(w_in, x.dtype), cast_weight(w_out, x.dtype)
    linear_gelu_bwd, recompute = module_of(impl, "gelu").linear_gelu_bwd, g.shape[0] != h.shape[0]
    with torch.cuda.device_of(x), torch.autocast(x.device.type, enabled=False):
        dh, db_in, g_again = linear_gelu_bwd(dy, w_out_cast, h, b_in, recompute)
        # `matmul` writes weight gradients in the dtype of the weights, without rounding to that of
        # x.
        dw_out = matmul(dy.T, g_again if recompute else g, w_out.dtype)
        dw_in = matmul(dh.T, x, w_in.dtype)
        return dh @ w_in_cast, dw_in, x.new_empty(0) if db_in is None else db_in, dw_out
