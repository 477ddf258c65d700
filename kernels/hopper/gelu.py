"""A linear layer and a GELU in one kernel, and their gradients in another, for Hopper."""

import torch
from torch import Tensor

from kernels.hopper.product import ProductPlan, launch_product
from kernels.triton.sums import add_parts

FORWARD = ProductPlan(transposed=True, gradient=False)
BACKWARD = ProductPlan(transposed=False, gradient=True, gelu=False)
BACKWARD_AND_GELU = ProductPlan(transposed=False, gradient=True)


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """As `kernels.reference.gelu.linear_gelu`, for what `kernels.hopper.linear_obstacle` allows."""
    h, g = (x.new_empty(x.shape[0], weight.shape[0]) for _ in range(2))
    launch_product(x, weight, h, g, None, bias, FORWARD)
    return h, g


def linear_gelu_bwd(
    dy: Tensor, weight: Tensor, h: Tensor, bias: Tensor, recompute: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """As `kernels.reference.gelu.linear_gelu_bwd`."""
    dh, g = torch.empty_like(h), torch.empty_like(h) if recompute else None
    plan = BACKWARD_AND_GELU if recompute else BACKWARD
    sums = launch_product(dy, weight, h, g, dh, bias, plan)
    assert sums is not None
    return dh, add_parts(sums, bias.dtype), g
