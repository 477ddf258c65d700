"""Type checks of arguments. Each error names the argument, its value and what it must be.

NumPy's bool and float32 are refused, because some functions of PyTorch do not accept them.
"""

import reprlib
from typing import Any

import torch
from torch import Tensor

_WHOLE = (int, torch.SymInt)
_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)


def check_bool(name: str, value: Any) -> None:
    """Refuse a value that is neither a bool nor a SymBool, which torch.compile makes of sizes."""
    if not isinstance(value, (bool, torch.SymBool)):
        raise ValueError(f"{name} must be True or False, got {_described(value)}")


def _is_one_of(types: tuple[type, ...], value: Any) -> bool:
    """Whether `value` has one of these types, and is neither a bool nor an int above 64 bits."""
    if not isinstance(value, types) or isinstance(value, bool):
        return False
    return type(value) is not int or -(2**63) <= value < 2**63


def check_number(name: str, value: Any, *, or_none: bool = False) -> None:
    """Refuse a value that is not an int or a float; a bool is neither."""
    if not _is_one_of(_NUMBERS, value) and not (or_none and value is None):
        raise _error(name, "a number", value, or_none, ": convert it with float()")


def is_whole_number(value: Any) -> bool:
    """Whether `value` is an int of 64 bits, and not a bool."""
    return _is_one_of(_WHOLE, value)


def check_whole_number(name: str, value: Any, *, or_none: bool = False) -> None:
    """Refuse a value that is not an int of 64 bits; a bool is not one."""
    if not is_whole_number(value) and not (or_none and value is None):
        raise _error(name, "a whole number of 64 bits", value, or_none)


def check_tensor(name: str, value: Any, *, or_none: bool = False) -> None:
    """Refuse a value that is not a tensor."""
    if not isinstance(value, Tensor) and not (or_none and value is None):
        raise _error(name, "a torch.Tensor", value, or_none, ": convert it with torch.as_tensor()")


def check_tensors(**tensors: Any) -> None:
    """Apply `check_tensor` to each keyword argument, under its name."""
    for name, value in tensors.items():
        check_tensor(name, value)


def plain_bool(value: bool) -> bool:
    """Convert to a bool that PyTorch's functions accept, also under torch.compile.

    There, with dynamic shapes, a comparison of sizes is a SymBool, which they refuse. A branch
    makes it a constant with a guard; bool() does not.
    """
    return True if value else False  # noqa: SIM210


def _error(name: str, kind: str, value: Any, or_none: bool, advice: str = "") -> ValueError:
    kind += " or None" if or_none else ""
    return ValueError(f"{name} must be {kind}, got {_described(value)}{advice}")


def _described(value: Any) -> str:
    if value is None:
        return "None"
    kind = type(value)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"{reprlib.repr(value)} ({module}{kind.__qualname__})"
