"""Detect torch.func transforms and forward-mode AD, which the operators do not support."""

import torch
from torch import Tensor, nn
from torch._C._functorch import get_interpreter_stack, peek_interpreter_stack
from torch.autograd import forward_ad, profiler

_PLAIN = frozenset({Tensor, nn.Parameter})


def is_plain_call(*tensors: Tensor) -> bool:
    """Whether a call is eager, on plain tensors, and nothing needs to see the operators in it.

    torch.compile, the JIT's tracer, subclasses of Tensor, dispatch modes (FLOP counters, selective
    checkpointing), transforms of torch.func and the profiler act on operators. Meta tensors and
    views with a negative bit need the dispatcher.
    """
    return (
        not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._get_tracing_state() is None
        and active_transform() is None
        and not profiler._is_profiler_enabled
        and _PLAIN.issuperset(map(type, tensors))
        and not any([x.is_meta or x.is_neg() for x in tensors])  # noqa: C419  # faster
    )


def active_transform() -> str | None:
    """Name of the innermost active transform, or None; always None under torch.compile."""
    # torch.compile cannot trace the look-up.
    if torch.compiler.is_compiling():
        return None
    interpreter = peek_interpreter_stack()
    if interpreter is not None:
        return f"torch.func.{interpreter.key().name.lower()}"
    return "forward-mode AD" if in_forward_mode() else None


def in_forward_mode() -> bool:
    """Whether forward-mode AD, including torch.func.jvp, is active; False under torch.compile."""
    return not torch.compiler.is_compiling() and forward_ad._current_level >= 0


def refuse_derivatives(function: str, instead: str) -> None:
    """Refuse transforms that differentiate, for a function that only torch.autograd supports.

    torch.vmap is supported: PyTorch calls the operator for each sample.

    Args:
        function: its name, for the message.
        instead: an alternative that supports these transforms, for the message.

    Raises:
        RuntimeError: such a transform is active.
    """
    if active_transform() is None:
        return
    stack = get_interpreter_stack() or []
    active = {interpreter.key().name.lower() for interpreter in stack} - {"vmap"}
    if active or in_forward_mode():
        name = f"torch.func.{min(active)}" if active else "forward-mode AD"
        raise RuntimeError(
            f"{function} does not support {name}: use torch.autograd.grad, or {instead}"
        )
