"""Operators that PyTorch knows: schema, implementation, fake, gradient and FLOP count in one call.

They do without `torch.library.custom_op`, whose checks at each call cost the CPU more time.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula


def operator(
    name: str,
    *,
    fake: Callable,
    gradient: tuple[Callable, Callable] | str | None = None,
    flops: Callable[..., int] | None = None,
    schema: str | None = None,
) -> Callable[[Callable], Callable]:
    """Register the decorated function as torch.ops.papilio.<name>.

    Args:
        fake: its outputs without their numbers, from its arguments.
        gradient: (setup_context, backward), or the error of whoever asks for a gradient; None: it
            is never asked for.
        flops: FLOPs from its arguments, with shapes in the place of tensors.
        schema: None: that of the function's annotations.
    """
    qualified = f"papilio::{name}"

    def register(function: Callable) -> Callable:
        of = schema or torch.library.infer_schema(function, mutates_args=())
        torch.library.define(qualified, of)
        torch.library.impl(qualified, "CompositeExplicitAutograd", function)
        torch.library.register_fake(qualified, fake)
        if isinstance(gradient, str):
            torch.library.register_autograd(qualified, _refusal(gradient))
        elif gradient is not None:
            setup_context, backward = gradient
            torch.library.register_autograd(qualified, backward, setup_context=setup_context)
        if flops is not None:
            packet = getattr(torch.ops.papilio, name)
            count = flops
            register_flop_formula(packet)(lambda *args, out_shape=None: count(*args))
        return function

    return register


def _refusal(message: str) -> Callable:
    def backward(ctx: Any, *grads: Any) -> None:
        raise RuntimeError(message)

    return backward
