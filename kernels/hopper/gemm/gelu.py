"""A linear layer and a GELU in one kernel, and their gradients in another, for Hopper."""

import torch
from torch import Tensor

from ...fused.triton.sums import add_parts
from .gemm import GemmPlan, launch_gemm

FORWARD = GemmPlan(transposed=True, gradient=False)


def backward_plan(*, bias: bool, recompute: bool) -> GemmPlan:
    """Plan of the gradients; with `recompute`, it also computes the GELU again."""
    return GemmPlan(transposed=False, gradient=True, stores_g=recompute, bias=bias)


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Same as `kernels.fused.reference.gelu.linear_gelu`, in one kernel.

    Inputs are those that `unsupported_linear` accepts.
    """
    h, g = (x.new_empty(x.shape[0], weight.shape[0]) for _ in range(2))
    if bias is None:
        # Without a bias to read, the compiler starts both halves of a tile at once, and spills.
        bias = h.new_zeros(h.shape[1], dtype=torch.float32)
    launch_gemm(x, weight, h, g, None, bias, FORWARD)
    return h, g


def linear_gelu_bwd(
    dy: Tensor, weight: Tensor, h: Tensor, bias: Tensor | None, recompute: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Same as `kernels.fused.reference.gelu.linear_gelu_bwd`, in one kernel."""
    dh, g = torch.empty_like(h), torch.empty_like(h) if recompute else None
    plan = backward_plan(bias=bias is not None, recompute=recompute)
    sums = launch_gemm(dy, weight, h, g, dh, bias, plan)
    if bias is None or sums is None:
        return dh, None, g
    return dh, add_parts(sums, bias.dtype), g
