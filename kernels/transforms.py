"""torch.func's transforms and forward-mode AD, which autograd of the operators does not serve."""

import torch
from torch import Tensor, nn
from torch._C._functorch import get_interpreter_stack, peek_interpreter_stack
from torch.autograd import forward_ad, profiler

_PLAIN = frozenset({Tensor, nn.Parameter})


def is_plain_call(*tensors: Tensor) -> bool:
    """Whether a call is eager, of plain tensors, and nothing has to see the operators in it.

    torch.compile, the JIT's tracer, subclasses of Tensor, dispatch modes (FLOP counters, selective
    checkpointing), transforms of torch.func and the profiler look at operators. Meta tensors and
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
    """Name of the innermost transform at work, or None, as always within torch.compile."""
    if torch.compiler.is_compiling():
        return None  # which cannot trace the look-up
    interpreter = peek_interpreter_stack()
    if interpreter is not None:
        return f"torch.func.{interpreter.key().name.lower()}"
    return "forward-mode AD" if in_forward_mode() else None


def in_forward_mode() -> bool:
    """Whether forward-mode AD is at work, torch.func.jvp's included; False in torch.compile."""
    return not torch.compiler.is_compiling() and forward_ad._current_level >= 0


def refuse_derivatives(function: str, instead: str) -> None:
    """Refuse transforms that differentiate a function whose operator only torch.autograd can.

    torch.vmap is served: PyTorch calls the operator for each sample.

    Args:
        function: its name.
        instead: what supports them.

    Raises:
        RuntimeError: such a transform is at work.
    """
    if active_transform() is None:
        return
    stack = get_interpreter_stack() or []
    at_work = {interpreter.key().name.lower() for interpreter in stack} - {"vmap"}
    if at_work or in_forward_mode():
        name = f"torch.func.{min(at_work)}" if at_work else "forward-mode AD"
        raise RuntimeError(
            f"{function} does not support {name}: use torch.autograd.grad, or {instead}"
        )
