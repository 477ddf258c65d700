"""`@operator`: one call that defines a PyTorch operator with its fake, gradient and FLOP count.

It uses the low-level API of torch.library: the checks that `torch.library.custom_op` adds to each
call cost CPU time.
"""

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch
from torch.utils.flop_counter import register_flop_formula

Function = TypeVar("Function", bound=Callable[..., Any])


def operator(
    name: str, *, fake: Callable[..., Any], setup_context: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None, flops: Callable[..., int] | None = None,
    schema: str | None = None,
) -> Callable[[Function], Function]:  # fmt: skip
    """Register the decorated function as torch.ops.papilio.<name>.

    Args:
        fake: returns empty outputs with the right shapes, dtypes and devices.
        setup_context: saves what `backward` needs, as (ctx, inputs, output).
        backward: gradients of the inputs, as (ctx, *output_grads). `not_differentiable` raises an
            error instead. None: nothing ever differentiates this operator.
        flops: FLOPs from the arguments, with shapes in place of tensors. None: not counted.
        schema: of torch.library; None infers it from the annotations of the function.
    """
    qualified = f"papilio::{name}"

    def register(function: Function) -> Function:
        signature = schema or torch.library.infer_schema(function, mutates_args=())
        torch.library.define(qualified, signature)
        torch.library.impl(qualified, "CompositeExplicitAutograd", function)
        torch.library.register_fake(qualified, fake)
        if backward is not None:
            torch.library.register_autograd(qualified, backward, setup_context=setup_context)
        if (formula := flops) is not None:
            # The FLOP counter also passes out_shape, which no formula here needs.
            count = register_flop_formula(getattr(torch.ops.papilio, name))
            count(lambda *args, out_shape=None: formula(*args))
        return function

    return register


def not_differentiable(message: str) -> Callable[..., NoReturn]:
    """Make a `backward` that raises RuntimeError with this message."""

    def backward(ctx: Any, *grads: Any) -> NoReturn:
        raise RuntimeError(message)

    return backward
