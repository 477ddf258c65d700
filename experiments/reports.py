"""What reports are made of: the cells of their tables, the files beside their JSON."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from data.files import write_atomically
from evaluation.markdown import markdown_table
from evaluation.style import save
from experiments.harness import Command

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def table(rows: Iterable[Mapping[str, str]], missing: str = "") -> str:
    """A Markdown table of rows by column; `missing` stands where a row lacks a column."""
    rows = list(rows)
    columns = list(dict.fromkeys(column for row in rows for column in row))
    return markdown_table(
        columns, ([row.get(column, missing) for column in columns] for row in rows)
    )


def interval_text(interval: Sequence[float] | None, scale: float = 1) -> str:
    """An interval, times `scale`, with one digit; a dash for none."""
    if interval is None:
        return "-"
    low, high = interval
    return f"{scale * low:.1f} to {scale * high:.1f}"


def mean_text(mean: float, interval: Sequence[float], scale: float = 1) -> str:
    """A mean and its interval, both times `scale`, with one digit."""
    return f"{scale * mean:.1f} ({interval_text(interval, scale)})"


def publish(path: Path, text: str, figure: "Figure") -> None:
    """Write Markdown and a picture beside the JSON at `path`, and print the former."""
    write_atomically(path.with_suffix(".md"), text.encode())
    save(figure, path.with_suffix(".png"))
    print(text)
    print(f"wrote {path.with_suffix('.md')} and its picture")


def report_command(name: str) -> Command:
    """The command of a report's module, which takes a JSON and writes its Markdown and picture."""
    command = Command(name)
    command.add("result", type=Path, metavar="FILE", help="a report's JSON")
    command.read()
    return command
