"""Strict conversion of plain values to the types of a schema: no type is taken for another."""

import unicodedata
from dataclasses import is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin


class MismatchError(ValueError):
    """A value that is not of its setting's type; `str()` is a reason beyond that, or empty."""


def convert(kind: Any, value: Any) -> Any:
    """A value of plain types as one of the type `kind`; dataclasses are made by the caller.

    A number is not text, and neither 0 nor 1 is a boolean. A whole number is also a float.

    Raises:
        MismatchError: it is not one.
    """
    if type(value) is str and "${" in value:
        raise MismatchError("holds ${, and nothing is filled in: write out what it stands for")
    origin, of = get_origin(kind), get_args(kind)
    if origin in (UnionType, Union):
        for each in of:
            try:
                return convert(each, value)
            except MismatchError as error:
                if str(error):
                    raise
        raise MismatchError
    if origin is Literal:
        if any(value == each and type(value) is type(each) for each in of):
            return value
    elif origin in (tuple, list):
        if isinstance(value, (list, tuple)) and (origin is list or len(value) == len(of)):
            if not is_dataclass(of[0]):
                return origin(convert(of[0], item) for item in value)
            if not all(isinstance(item, dict) for item in value):
                raise MismatchError("must be a list of settings, as in [{path: out/data}]")
            return value
    elif kind is float and type(value) is int and abs(value) < 1 << 1000:
        return float(value)
    elif kind is str and type(value) is str:
        _check_text(value)
        return value
    elif kind in (bool, int, float, NoneType) and type(value) is kind:
        return value
    raise MismatchError


def _check_text(text: str) -> None:
    if text == "???":
        raise MismatchError("is ???, which stands for no value: set it, or leave it out")
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in text):
        raise MismatchError("holds a control character: leave it out")
