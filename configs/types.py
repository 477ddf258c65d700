"""Strict conversion of plain values to the types of a schema, without implicit casts."""

import unicodedata
from dataclasses import is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin


class MismatchError(ValueError):
    """Error for a value of the wrong type; the message is empty unless there is another reason."""


def convert(kind: Any, value: Any) -> Any:
    """Convert a value of plain types to the type `kind`; the caller constructs dataclasses.

    A number is not text, and 0 and 1 are not booleans. A whole number is also a valid float.

    Raises:
        MismatchError: the value does not have this type.
    """
    if type(value) is str and "${" in value:
        raise MismatchError("contains ${, which is not interpolated: write out the value")
    origin, args = get_origin(kind), get_args(kind)
    if origin in (UnionType, Union):
        for arg in args:
            try:
                return convert(arg, value)
            except MismatchError as error:
                if str(error):
                    raise
        raise MismatchError
    if origin is Literal:
        if any(value == choice and type(value) is type(choice) for choice in args):
            return value
    elif origin in (tuple, list):
        if isinstance(value, (list, tuple)) and (origin is list or len(value) == len(args)):
            if not is_dataclass(args[0]):
                return origin(convert(args[0], item) for item in value)
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
        raise MismatchError("is ???, which means a missing value: set it, or leave it out")
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in text):
        raise MismatchError("contains a control character: remove it")
