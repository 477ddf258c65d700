"""Settings of a schema, which is a dataclass of dataclasses: key, type, default and docstring.

The docstring is the string below a field (PEP 257). Python discards it, so it is read from the
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
    """One setting of a configuration."""

    key: str
    """Key on the command line: model.mask.block_size, or data.phases[].steps for list items."""
    kind: str
    """Type in words: "a whole number", or the possible values."""
    default: Any
    """Default value, or dataclasses.MISSING if the setting is required."""
    text: str
    """Docstring in one line."""
    type: Any
    """Type annotation."""


@cache
def settings_of(schema: type) -> Mapping[str, Setting]:
    """Return the settings of a schema by key, in the order of the schema."""
    return {setting.key: setting for setting in _settings(schema, "")}


def format_value(value: Any) -> str:
    """Format a value of plain types as on the command line."""
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
        yield Setting(key=key, kind=_type_in_words(kind), default=default, text=text, type=kind)
        if get_origin(kind) is list:
            (item,) = get_args(kind)
            if is_dataclass(item):
                assert isinstance(item, type)
                yield from _settings(item, f"{key}[].")


def _type_in_words(kind: Any) -> str:
    *others, last = _alternatives(kind)
    return f"{', '.join(others)} or {last}" if others else last


def _alternatives(kind: Any) -> list[str]:
    """List the values of a Literal, or describe each type of a union."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return [str(value) for value in args]
    if origin is tuple:
        return [f"a list of {len(args)}, each {_type_in_words(args[0])}"]
    if origin is list:
        if get_origin(args[0]) is list:
            return ["a list of lists of numbers, such as [[1, 2], [3, 4]] or []"]
        return ["a list" if is_dataclass(args[0]) else f"a list, each {_type_in_words(args[0])}"]
    if origin in (UnionType, Union):  # a | b is a typing.Union if a is a Literal
        return [text for arg in args for text in _alternatives(arg)]
    return [_KINDS[kind]]


def _docstrings(schema: type) -> dict[str, str]:
    """Return the docstrings of a dataclass's fields by name, including inherited ones."""
    texts = {}
    for dataclass_ in reversed(schema.__mro__):
        if not is_dataclass(dataclass_):
            continue
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(dataclass_))).body
        assert isinstance(definition, ast.ClassDef)
        for statement, following in pairwise(definition.body):
            match statement, following:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    texts[name] = " ".join(text.split())
    return texts
