"""torch.func's transforms and forward-mode AD, which autograd of the operators does not serve."""

import torch
from torch._C._functorch import get_interpreter_stack, peek_interpreter_stack
from torch.autograd import forward_ad


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
