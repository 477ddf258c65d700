"""Tables and numbers as the reports and README.md write them."""

import math
from collections.abc import Iterable, Mapping, Sequence


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
