"""A linear layer and an activation in one kernel, and their gradients in another, for Hopper."""

import torch
from torch import Tensor

from ...fused.triton.sums import add_parts
from .gemm import GemmPlan, launch_gemm


def forward_plan(activation: str) -> GemmPlan:
    """Plan of a linear layer and an activation, as in `kernels.fused.mlp.mlp`."""
    return GemmPlan(transposed=True, gradient=False, relu_squared=activation == "relu_squared")


def backward_plan(activation: str, *, bias: bool, recompute: bool) -> GemmPlan:
    """Plan of the gradients; with `recompute`, it also computes the activation again."""
    return GemmPlan(
        transposed=False, gradient=True, relu_squared=activation == "relu_squared",
        stores_g=recompute, bias=bias,
    )  # fmt: skip


def linear_activation(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str
) -> tuple[Tensor, Tensor]:
    """Same as `kernels.fused.reference.activation.linear_activation`, in one kernel.

    Inputs are those that `unsupported_linear` accepts.
    """
    h, g = (x.new_empty(x.shape[0], weight.shape[0]) for _ in range(2))
    if bias is None:
        # Without a bias to read, the compiler starts both halves of a tile at once, and spills.
        bias = h.new_zeros(h.shape[1], dtype=torch.float32)
    launch_gemm(x, weight, h, g, None, bias, forward_plan(activation))
    return h, g


def linear_activation_bwd(
    dy: Tensor, weight: Tensor, h: Tensor, bias: Tensor | None, activation: str, recompute: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Same as `kernels.fused.reference.activation.linear_activation_bwd`, in one kernel."""
    dh, g = torch.empty_like(h), torch.empty_like(h) if recompute else None
    plan = backward_plan(activation, bias=bias is not None, recompute=recompute)
    sums = launch_gemm(dy, weight, h, g, dh, bias, plan)
    if bias is None or sums is None:
        return dh, None, g
    return dh, add_parts(sums, bias.dtype), g
