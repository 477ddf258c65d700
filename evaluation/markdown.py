"""Tables and numbers as the reports and README.md write them."""

import math
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_MOST_CHARS = 1000
# Intraword underscores are plain in Markdown; a bare address and an @name become links on GitHub.
_SPECIAL = re.compile(r"[&<>`*\[\]|\\~$@!]|(?<!\w)_|_(?!\w)|:(?=//)|(?<=www)\.")


def escape(text: str) -> str:
    """Text of somebody's run, such as its name, so that Markdown and HTML show it as it is.

    Line breaks and other control characters become spaces, and a long text is cut.
    """
    return _SPECIAL.sub(lambda found: f"&#{ord(found[0])};", _flat(text))


def code(text: str) -> str:
    """A code span of a text, in which Markdown reads nothing but the backtick."""
    return "`" + _flat(text).replace("`", "'") + "`"


def _flat(text: str) -> str:
    """At most 1,000 characters of a text, with spaces for line breaks and control characters."""
    return "".join(" " if unicodedata.category(c)[0] in "CZ" else c for c in text[:_MOST_CHARS])


def escaped(values: Any) -> Any:
    """Plain values with every text in them escaped, but for the keys of dictionaries."""
    if isinstance(values, dict):
        return {key: escaped(value) for key, value in values.items()}
    if isinstance(values, (list, tuple)):
        return [escaped(value) for value in values]
    return escape(values) if isinstance(values, str) else values


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lines of a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def dict_table(rows: Iterable[Mapping[str, str]]) -> str:
    """Lines of a Markdown table whose rows, one at least, all have the keys of its header."""
    rows = list(rows)
    return markdown_table(list(rows[0]), [list(row.values()) for row in rows])


def with_interval(mean: float | None, interval: Sequence[float | None]) -> str:
    """A mean, nats, with its interval if there is one."""
    low, high = interval
    if not is_known(low, high):
        return digits(mean, "z.4f")
    return f"{digits(mean, 'z.4f')} ({low:z.4f} to {high:z.4f})"


def digits(value: float | None, how: str) -> str:
    """A number in the given format, of which z writes no -0.0; a dash where it is not known."""
    return format(value, how) if is_known(value) else "-"


def is_known(*numbers: float | None) -> bool:
    """Whether none of them is NaN, or null as in JSON."""
    return all(number is not None and not math.isnan(number) for number in numbers)
