"""Safe YAML reader and writer: only mappings, lists and scalars.

Configurations may come from untrusted sources. So aliases and tags are refused, and nothing is
interpolated. Errors name the line but never quote it, because the file may be a link to a private
one. Scalars follow YAML 1.2, whose only booleans are true and false: `no` and `1:30` are text.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

MAX_BYTES = 1 << 18  # limit of a configuration; those in configs/ have at most 4,000
_MAX_DEPTH = 12
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NULL = re.compile(r"~|null|Null|NULL|")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_DIGITS = r"[0-9]+(?:_[0-9]+)*"
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,39}|[1-9][0-9]{0,19}(?:_[0-9]{1,19}){1,9})")
_FLOAT = re.compile(
    rf"[-+]?(?:\.[0-9]+|{_DIGITS}\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[-+]?{_DIGITS}[eE][-+]?[0-9]+"
)
_SPECIAL = re.compile(r"([-+]?)\.?(inf|Inf|INF|nan|NaN|NAN)")


class YamlError(ValueError):
    """Error for a text that is not plain YAML. The message names the line, not its content."""


@dataclass(frozen=True)
class Document:
    """Values of a YAML document, and the lines of its keys."""

    values: Any
    lines: dict[str, int] = field(default_factory=dict)
    """Line on which each key is first set; keys in a list are written as "data.mix[].path"."""


def load(path: Path) -> Document:
    """Read a YAML file.

    Raises:
        YamlError: the file is too large, not UTF-8, or not plain YAML.
    """
    if (size := path.stat().st_size) > MAX_BYTES:
        raise YamlError(f"it has {size} bytes, and a configuration may have at most {MAX_BYTES}")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise YamlError(f"byte {error.start} is not UTF-8") from error
    return parse(text)


def parse(text: str) -> Document:
    """Read a YAML text.

    Raises:
        YamlError: the text is not plain YAML.
    """
    lines: dict[str, int] = {}
    try:
        events: Iterator[Any] = iter(yaml.parse(text, Loader=yaml.SafeLoader))
        next(events)  # the start of the stream
        if isinstance(next(events), yaml.StreamEndEvent):
            return Document(None)
        values = _value(next(events), events, lines, "", 0)
        next(events)  # the end of the document
        next_event = next(events)
        if not isinstance(next_event, yaml.StreamEndEvent):
            raise YamlError(f"line {_line(next_event)} begins a second document: keep one")
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "its end"
        raise YamlError(
            f"it cannot be parsed at {place}: indent with spaces, and close brackets and quotes"
        ) from None  # because the cause may quote the file
    except yaml.reader.ReaderError as error:
        raise YamlError(f"character {error.position} is a control character") from None
    except (ValueError, OverflowError) as error:  # for example, an escape beyond Unicode
        if isinstance(error, YamlError):
            raise
        raise YamlError("it has an escape or a version out of range") from None
    return Document(values, lines)


def dump(values: Any) -> str:
    """Write plain data as YAML that `parse` reads back."""
    return yaml.dump(
        values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False
    )


def _value(
    event: yaml.Event, events: Iterator[Any], lines: dict[str, int], key: str, depth: int
) -> Any:
    """Read the value of the node that starts with `event`, and consume its other `events`."""
    line = _line(event)
    if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
        raise YamlError(f"line {line} has an anchor or an alias: write the value out")
    if getattr(event, "tag", None) is not None:
        raise YamlError(f"line {line} has a tag: a configuration may only have plain values")
    if depth > _MAX_DEPTH:
        raise YamlError(f"line {line} is nested more than {_MAX_DEPTH} deep")
    if isinstance(event, yaml.ScalarEvent):
        return _scalar(event.value) if event.style is None else event.value
    if isinstance(event, yaml.SequenceStartEvent):
        return [
            _value(item, events, lines, f"{key}[]", depth + 1)
            for item in _until(yaml.SequenceEndEvent, events)
        ]
    values: dict[str, Any] = {}
    line_of_name: dict[str, int] = {}
    for name in _until(yaml.MappingEndEvent, events):
        plain = isinstance(name, yaml.ScalarEvent) and not name.tag and not name.anchor
        if not plain or not _KEY.fullmatch(name.value):
            raise YamlError(
                f"line {_line(name)} has a key that is not a name: write sections, as in "
                "model: {n_layer: 4}"
            )
        if name.value in values:
            raise YamlError(
                f"line {_line(name)} sets a key again that line {line_of_name[name.value]} sets"
            )
        line_of_name[name.value] = _line(name)
        full_key = f"{key}.{name.value}" if key else name.value
        lines.setdefault(full_key, _line(name))
        values[name.value] = _value(next(events), events, lines, full_key, depth + 1)
    return values


def _until(end: type[yaml.Event], events: Iterator[Any]) -> Iterator[Any]:
    while not isinstance(event := next(events), end):
        yield event


def _line(event: yaml.Event) -> int:
    return event.start_mark.line + 1


def _scalar(text: str) -> Any:
    """Convert a scalar without quotes to its value."""
    if _NULL.fullmatch(text):
        return None
    if _BOOL.fullmatch(text):
        return text.lower() == "true"
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    if special := _SPECIAL.fullmatch(text):
        return float(special[1] + special[2])
    return text


class _Dumper(yaml.SafeDumper):
    """YAML dumper without aliases, which quotes text that `_scalar` would read as another type."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def text(self, text: str) -> yaml.ScalarNode:
        style = None if isinstance(_scalar(text), str) else "'"
        return self.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _Dumper.text)
