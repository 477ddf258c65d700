"""Parts of reports: table cells, display names, and the files next to a JSON result."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from data.files import write_atomically
from evaluation.style import save
from experiments.harness import Command

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def display_name(contender: str) -> str:
    """Name of a contender in tables and pictures; results store Papilio's as "ours"."""
    if contender == "standard":
        return "standard attention"
    return re.sub(r"^ours\b", "Papilio", contender)


def interval_text(interval: Sequence[float] | None, scale: float = 1) -> str:
    """Format an interval times `scale` with one decimal; None becomes a dash."""
    if interval is None:
        return "-"
    low, high = interval
    return f"{scale * low:.1f} to {scale * high:.1f}"


def mean_text(mean: float, interval: Sequence[float], scale: float = 1) -> str:
    """Format a mean and its interval, both times `scale`, with one decimal."""
    return f"{scale * mean:.1f} ({interval_text(interval, scale)})"


def tokens_text(tokens: float) -> str:
    """Format a number of tokens, as 118M or 1.2B."""
    return f"{tokens / 1e6:.0f}M" if tokens < 0.9995e9 else f"{tokens / 1e9:.3g}B"


def publish(path: Path, text: str, figure: "Figure") -> None:
    """Write Markdown and a picture next to the JSON at `path`, and print the Markdown."""
    write_atomically(path.with_suffix(".md"), text.encode())
    save(figure, path.with_suffix(".png"))
    print(text)
    print(f"wrote {path.with_suffix('.md')} and its picture")


def report_command(name: str) -> Command:
    """Command of a report module: read a JSON result, write its Markdown and picture."""
    command = Command(name)
    command.add("result", type=Path, metavar="FILE", help="JSON of a report")
    command.read()
    return command
