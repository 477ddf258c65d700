"""Split of a query-key-value projection, with RMSNorms and rotary embeddings: `rotary_qkv`.

On a GPU, one kernel reads the projection once and writes queries and keys. In the backward pass,
another reads the gradients of all three and writes that of the projection.

Shapes: B batch, T tokens, H heads of queries, H_kv of keys and of values, D head_dim.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import triton
from ..argument_types import check_number, check_tensor, check_tensors, check_whole_number
from ..registration import not_differentiable, operator
from .dispatch import module_of, select_impl
from .reference.rotary import apply_rotary


def rotary_qkv(
    qkv: Tensor, n_kv_head: int, cos: Tensor, sin: Tensor,
    *, q_weight: Tensor | None = None, k_weight: Tensor | None = None,
    eps: float = 1e-6, impl: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Split a projection into queries, keys and values, and rotate queries and keys.

    With weights, each query and each key is first divided by its root mean square over D (an
    RMSNorm of each head). Then its pairs (x[i], x[i + D/2]) are rotated by the angles of its
    position, so that scores depend on distances. Repeated calls give the same bits.

    Args:
        qkv: (B, T, H + 2 H_kv, D), the heads of queries, then of keys, then of values;
            floating-point, D even. Computed in fp32, or in fp64 if it is fp64.
        n_kv_head: H_kv.
        cos, sin: (T, D/2), or (B, T, D/2) if each row has its own positions; floating-point.
            They have no gradient.
        q_weight, k_weight: (D,) each, floating-point, of the RMSNorms; None for both: no norms.
        eps: added to the mean square; at least 0.
        impl: "triton" (kernels, on a GPU) or "reference" (PyTorch, any device); None picks.

    Returns:
        q (B, T, H, D), k and v (B, T, H_kv, D), in the dtype of qkv; v is a view of it, and must
        not be changed in place.

    Raises:
        ValueError: an argument is malformed, or the named impl cannot serve the call.

    Source: Su et al. 2021, "RoFormer" (arXiv 2104.09864), with the pairs of GPT-NeoX; Henry et al.
    2020, "Query-Key Normalization" (arXiv 2010.04245).
    """
    _check(qkv, n_kv_head, cos, sin, q_weight, k_weight, eps)
    reason = triton.unsupported_device(qkv, "qkv") or triton.unsupported_transform()
    if select_impl(impl, qkv, triton=reason) == "triton":
        return _RotaryQKV.apply(qkv, cos, sin, q_weight, k_weight, n_kv_head, eps)
    q, k, v = _split(qkv, n_kv_head)
    if q_weight is not None and k_weight is not None:
        q, k = (_rms_norm(x, weight, eps) for x, weight in ((q, q_weight), (k, k_weight)))
    wide = torch.promote_types(qkv.dtype, torch.float32)
    cos, sin = cos.detach().to(wide), sin.detach().to(wide)
    q, k = (apply_rotary(x, cos, sin).to(qkv.dtype) for x in (q, k))
    return q, k, v


def _check(
    qkv: Tensor, n_kv_head: int, cos: Tensor, sin: Tensor,
    q_weight: Tensor | None, k_weight: Tensor | None, eps: float,
) -> None:  # fmt: skip
    check_tensors(qkv=qkv, cos=cos, sin=sin)
    check_whole_number("n_kv_head", n_kv_head)
    check_number("eps", eps)
    B, T, n_heads, D = qkv.shape if qkv.dim() == 4 else (0, 0, 0, 0)
    if n_heads < 3 or D < 2 or D % 2 or not qkv.is_floating_point():
        raise ValueError(
            "qkv must be (B, T, H + 2 H_kv, D), floating-point, with at least 3 heads and an even "
            f"D, got {tuple(qkv.shape)} in {qkv.dtype}"
        )
    if not 1 <= n_kv_head <= (n_heads - 1) // 2:
        raise ValueError(
            f"n_kv_head must be from 1 to {(n_heads - 1) // 2}, as qkv has {n_heads} heads, got "
            f"{n_kv_head}"
        )
    if not 0 <= eps < math.inf:
        raise ValueError(f"eps must be a finite number of at least 0, got {eps}")
    for name, table in (("cos", cos), ("sin", sin)):
        if table.shape not in ((T, D // 2), (B, T, D // 2)) or not table.is_floating_point():
            raise ValueError(
                f"{name} must be ({T}, {D // 2}) or ({B}, {T}, {D // 2}), floating-point, to match "
                f"qkv {tuple(qkv.shape)}, got {tuple(table.shape)} in {table.dtype}"
            )
    if cos.shape != sin.shape:
        raise ValueError(f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)} must have one shape")
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        check_tensor(name, weight, or_none=True)
        if weight is not None and (weight.shape != (D,) or not weight.is_floating_point()):
            raise ValueError(
                f"{name} must be ({D},), floating-point, got {tuple(weight.shape)} in "
                f"{weight.dtype}"
            )
    if (q_weight is None) != (k_weight is None):
        raise ValueError("pass both q_weight and k_weight, or neither")
    tensors = {"cos": cos, "sin": sin, "q_weight": q_weight, "k_weight": k_weight}
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != qkv.device:
            raise ValueError(f"{name} is on {tensor.device}, but qkv on {qkv.device}")


def _split(qkv: Tensor, n_kv_head: int) -> tuple[Tensor, ...]:
    """Views of queries, keys and values."""
    return qkv.split((qkv.shape[2] - 2 * n_kv_head, n_kv_head, n_kv_head), dim=2)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension, in at least fp32."""
    wide = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    return F.rms_norm(x.to(wide), weight.shape, weight.to(wide), eps)


class _RotaryQKV(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor,
        q_weight: Tensor | None, k_weight: Tensor | None, n_kv_head: int, eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        q, k = torch.ops.papilio.rotary_qkv(qkv, cos, sin, q_weight, k_weight, n_kv_head, eps)
        # The gradient of a rotation is the inverse rotation, which does not depend on qkv.
        ctx.save_for_backward(None if q_weight is None else qkv, cos, sin, q_weight, k_weight)
        ctx.eps = eps
        return q, k, _split(qkv, n_kv_head)[2]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        qkv, cos, sin, q_weight, k_weight = ctx.saved_tensors
        dqkv, sums = torch.ops.papilio.rotary_qkv_bwd(
            *grads, qkv, cos, sin, q_weight, k_weight, ctx.eps
        )
        dq_weight, dk_weight = (
            None if weight is None else total.to(weight.dtype)
            for weight, total in zip((q_weight, k_weight), sums, strict=True)
        )
        return dqkv, None, None, dq_weight, dk_weight, None, None


def _fake(qkv, cos, sin, q_weight, k_weight, n_kv_head, eps):
    B, T, n_heads, D = qkv.shape
    return qkv.new_empty(B, T, n_heads - 2 * n_kv_head, D), qkv.new_empty(B, T, n_kv_head, D)


@operator("rotary_qkv", fake=_fake)
def _rotary_qkv(
    qkv: Tensor, cos: Tensor, sin: Tensor, q_weight: Tensor | None, k_weight: Tensor | None,
    n_kv_head: int, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Queries and keys."""
    tensors = [None if x is None else x.contiguous() for x in (qkv, cos, sin, q_weight, k_weight)]
    with torch.cuda.device_of(qkv):
        return module_of("triton", "rotary").rotary_qkv(*tensors, n_kv_head, eps)


def _fake_bwd(dq, dk, dv, qkv, cos, sin, q_weight, k_weight, eps):
    B, T, n_head, D = dq.shape
    return dq.new_empty(B, T, n_head + 2 * dk.shape[2], D), cos.new_empty(2, D, dtype=torch.float32)


@operator(
    "rotary_qkv_bwd",
    fake=_fake_bwd,
    backward=not_differentiable("rotary_qkv has no second derivative: pass impl='reference'"),
)
def _rotary_qkv_bwd(
    dq: Tensor, dk: Tensor, dv: Tensor, qkv: Tensor | None, cos: Tensor, sin: Tensor,
    q_weight: Tensor | None, k_weight: Tensor | None, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradient of qkv, and those of both weights, (2, D) fp32: 0 without weights."""
    given = dq, dk, dv, qkv, cos, sin, q_weight, k_weight
    tensors = [None if x is None else x.contiguous() for x in given]
    with torch.cuda.device_of(dq):
        return module_of("triton", "rotary").rotary_qkv_bwd(*tensors, eps)
