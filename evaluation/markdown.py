"""Format tables and numbers in Markdown, for reports and README.md."""

import math
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_MAX_CHARS = 1000
# Markdown ignores underscores inside a word. GitHub turns bare URLs and @names into links.
_SPECIAL = re.compile(r"[&<>`*\[\]|\\~$@!]|(?<!\w)_|_(?!\w)|:(?=//)|(?<=www)\.")


def escape(text: str) -> str:
    """Escape untrusted text, such as a run's name, so that Markdown and HTML show it literally.

    Line breaks and other control characters become spaces. Long text is truncated.
    """
    return _SPECIAL.sub(lambda match: f"&#{ord(match[0])};", _flat(text))


def code(text: str) -> str:
    """Markdown code span. Backticks, the only special character inside one, become quotes."""
    return "`" + _flat(text).replace("`", "'") + "`"


def _flat(text: str) -> str:
    """The first 1,000 characters, with line breaks and control characters replaced by spaces."""
    return "".join(" " if unicodedata.category(c)[0] in "CZ" else c for c in text[:_MAX_CHARS])


def escaped(values: Any) -> Any:
    """Escape every string in nested lists and dictionaries, except dictionary keys."""
    if isinstance(values, dict):
        return {key: escaped(value) for key, value in values.items()}
    if isinstance(values, (list, tuple)):
        return [escaped(value) for value in values]
    return escape(values) if isinstance(values, str) else values


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def dict_table(rows: Iterable[Mapping[str, str]], missing: str = "") -> str:
    """Format rows by column as a Markdown table; `missing` fills cells that a row lacks."""
    rows = list(rows)
    columns = list(dict.fromkeys(column for row in rows for column in row))
    return markdown_table(
        columns, ([row.get(column, missing) for column in columns] for row in rows)
    )


def with_interval(mean: float | None, interval: Sequence[float | None]) -> str:
    """Format a mean in nats, followed by its interval if that is known."""
    low, high = interval
    if not is_known(low, high):
        return digits(mean, "z.4f")
    return f"{digits(mean, 'z.4f')} ({low:z.4f} to {high:z.4f})"


def difference_cell(difference: Mapping[str, Any] | None) -> str:
    """Format a difference, a row with `nats` and `interval`; None becomes a dash."""
    return "-" if difference is None else with_interval(difference["nats"], difference["interval"])


def digits(value: float | None, how: str) -> str:
    """Format a number, or return a dash if it is unknown. The format's z prints -0.0 as 0.0."""
    return format(value, how) if is_known(value) else "-"


def is_known(*numbers: float | None) -> bool:
    """Whether every number is known, i.e. neither NaN nor None (null in JSON)."""
    return all(number is not None and not math.isnan(number) for number in numbers)
