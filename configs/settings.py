"""What settings a schema, a dataclass of dataclasses, has: key, type, default and docstring.

A docstring stands below its field (PEP 257), where Python does not keep it: it is read from the
source.
"""

import ast
import inspect
import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from itertools import pairwise
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    NoneType: "null",
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One value that a configuration may hold."""

    key: str
    """As on the command line: model.mask.block_size. data.phases[].steps is one of each phase."""
    kind: str
    """Its type in words, "a whole number" or the names to choose from."""
    default: Any
    """What it is where nobody sets it; MISSING (of dataclasses) if somebody must."""
    text: str
    """Its docstring in one line."""
    type: Any
    """Its annotation."""


@cache
def settings_of(schema: type) -> Mapping[str, Setting]:
    """The settings of a schema by key, in its order."""
    return {setting.key: setting for setting in _settings(schema, "")}


def written(value: Any) -> str:
    """A value of plain types as it is written on the command line."""
    if isinstance(value, str):
        return value
    return json.dumps(value, separators=(",", ":"), default=str)


def _settings(schema: type, prefix: str) -> Iterator[Setting]:
    types, texts = get_type_hints(schema), _docstrings(schema)
    for field in fields(schema):
        kind, key = types[field.name], prefix + field.name
        if isinstance(kind, type) and is_dataclass(kind):
            yield from _settings(kind, f"{key}.")
            continue
        default = field.default
        if field.default_factory is not MISSING:
            default = field.default_factory()
        text = texts.get(field.name, "")
        yield Setting(key=key, kind=_in_words(kind), default=default, text=text, type=kind)
        if get_origin(kind) is list:
            (of,) = get_args(kind)
            if is_dataclass(of):
                assert isinstance(of, type)
                yield from _settings(of, f"{key}[].")


def _in_words(kind: Any) -> str:
    *others, last = _words(kind)
    return f"{', '.join(others)} or {last}" if others else last


def _words(kind: Any) -> list[str]:
    """Of the values that a type has, or of each type of a union."""
    origin, of = get_origin(kind), get_args(kind)
    if origin is Literal:
        return [str(value) for value in of]
    if origin is tuple:
        return [f"a list of {len(of)}, each {_in_words(of[0])}"]
    if origin is list:
        return ["a list" if is_dataclass(of[0]) else f"a list, each {_in_words(of[0])}"]
    if origin in (UnionType, Union):  # a | b, and what it is where a is a Literal
        return [word for each in of for word in _words(each)]
    return [_KINDS[kind]]


def _docstrings(schema: type) -> dict[str, str]:
    """Of the fields by name, those that a dataclass inherits included."""
    texts = {}
    for each in reversed(schema.__mro__):
        if not is_dataclass(each):
            continue
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        assert isinstance(definition, ast.ClassDef)
        for statement, following in pairwise(definition.body):
            match statement, following:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    texts[name] = " ".join(text.split())
    return texts
