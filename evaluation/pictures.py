"""The pictures of an evaluation, from what evaluation/tables.py made."""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from evaluation.results import Row
from evaluation.style import COLOURS, LINES, MARKERS, PLAIN, name_ends, save

A_PANEL = 4  # models: the intervals of more cannot be told apart
FEW = 0.01  # a bin with a smaller share of the tokens does not widen a panel by its interval
RARE = 0.001  # a bin with a smaller share is not drawn
SHIFT = 0.05  # between models of one history, in doublings, so that all intervals are seen
LOSS = "nats", "interval"  # columns of a mean and its interval
DIFFERENCE = "difference", "difference_interval"

Look = dict[str, Any]  # colour, marker and line of a model


def draw(result: dict[str, Any], folder: Path) -> None:
    """Draw FOLDER/TABLE.png of each table of `result`, and delete pictures that have none.

    What is drawn are differences to the first model; of a single model, its losses.
    """
    looks = _looks(dict.fromkeys(run["label"] for run in result["runs"]))
    for name, make in PICTURES.items():
        path = folder / f"{name}.png"
        if result[name]:
            save(make(result[name], looks), path)
            print(f"drew {path}")
        else:
            path.unlink(missing_ok=True)


def by_history(rows: list[Row], looks: Mapping[str, Look]) -> Figure:
    """Differences to the first model at its longest, by the history of a window.

    A line is one model; where a history has several strides or document masks, one of these.
    """
    ways = {(row["label"], row["history"], row["document_mask"]) for row in rows}
    strides = sorted({row["stride"] for row in rows}) if len(ways) < len(rows) else []
    compared = any(row["difference"] for row in rows)
    histories_of_all = sorted({row["history"] for row in rows})

    def gap(row: Row) -> Row:
        # what others are compared with stands at zero; some are compared with nothing
        end = 0 if row["label"] == rows[0]["label"] else math.nan
        return row["difference"] or {"nats": end, "interval": [end, end]}

    def draw_lines(axes: Axes, rows: list[Row]) -> None:
        lines: dict[tuple[str, int | None, bool], list[Row]] = {}
        for row in rows:
            line = row["label"], row["stride"] if strides else None, row["document_mask"]
            lines.setdefault(line, []).append(row)
        ends = {}
        for number, ((label, stride, masked), line) in enumerate(lines.items()):
            look, name = dict(looks[label]), label
            if stride is not None:
                name += f", stride {stride:,}"
                look["linestyle"] = LINES[strides.index(stride) % len(LINES)]
            if masked:
                name += ", documents masked"
                look["markerfacecolor"] = "white"
            columns = LOSS if compared else ("nats", "nats_interval")
            means, low, high = _estimates([gap(r) for r in line] if compared else line, *columns)
            shift = 2 ** (SHIFT * (number - (len(lines) - 1) / 2))
            histories = shift * np.array([row["history"] for row in line])
            errors = np.maximum(0, [means - low, high - means])  # means of few may lie outside
            axes.errorbar(histories, means, errors, ms=5, lw=1.5, capsize=3, **look)
            if not np.isnan(means[-1]):
                ends[name] = means[-1], look["color"]
        axes.set_xticks(histories_of_all)
        axes.margins(x=0.1)
        name_ends(axes, ends, gap=0.09)

    one = [row for row in rows if row["label"] == rows[0]["label"]]
    # the first model has no line of its own where it is but what others are compared with
    drawn = rows if not compared or len(one) > 1 else [row for row in rows if row not in one]
    title = f"difference to {rows[0]['label']}" if compared else "loss"
    return _panels(drawn, draw_lines, title, "tokens that the model may see")


def by_bin(rows: list[Row], looks: Mapping[str, Look], *, x_label: str) -> Figure:
    """Differences to the first model over the middles of logarithmic bins."""
    first, *others = _labels(rows)
    columns = DIFFERENCE if others else LOSS

    def draw_lines(axes: Axes, rows: list[Row]) -> None:
        lines = {
            label: _frequent([row for row in rows if row["label"] == label], RARE)
            for label in _labels(rows)
        }
        for label, line in lines.items():
            _band(axes, line, columns, looks[label])
        if others:
            _limit(axes, lines.values())
        name_ends(axes, _ends(lines, columns, looks), gap=0.09)

    drawn = [row for row in rows if row["label"] != first] if others else rows
    return _panels(drawn, draw_lines, f"difference to {first}" if others else "loss", x_label)


def differences_by_bin(panels: Mapping[str, Mapping[str, list[Row]]], x_label: str) -> Figure:
    """Differences over the middles of logarithmic bins: by panel, the rows of each line."""
    figure = Figure(figsize=(8.5, 0.5 + 2.4 * len(panels)), layout="constrained")
    grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (title, lines) in zip(grid, panels.items(), strict=True):
        looks = _looks(["", *lines])
        shown = {label: _frequent(line, RARE) for label, line in lines.items()}
        for label, line in shown.items():
            _band(axes, line, DIFFERENCE, looks[label])
        _finish(axes, title)
        name_ends(axes, _ends(shown, DIFFERENCE, looks), gap=0.16)
    _logarithmic(grid[-1], x_label)
    figure.supylabel("difference, nats per token", size=10)
    return figure


PICTURES: dict[str, Callable[[list[Row], Mapping[str, Look]], Figure]] = {
    "strided": by_history,
    "chunk_position": partial(by_bin, x_label="position in the window"),
    "document_position": partial(by_bin, x_label="tokens before the scored one in its document"),
    "document_length": partial(by_bin, x_label="tokens of the document"),
}


def _looks(labels: Iterable[str]) -> dict[str, Look]:
    """Colour and marker of models; the first, which others are compared with, alone is grey."""
    first, *others = labels
    looks = {first: {"color": PLAIN, "marker": MARKERS[-1]}}
    for number, label in enumerate(others):
        look = number % len(COLOURS)
        looks[label] = {"color": COLOURS[look], "marker": MARKERS[look]}
    return looks


def _panels(
    rows: list[Row], draw_lines: Callable[[Axes, list[Row]], None], title: str, x_label: str
) -> Figure:
    """Panels below each other, of as many models as can be told apart."""
    labels = _labels(rows)
    groups = [labels[at : at + A_PANEL] for at in range(0, len(labels), A_PANEL)]
    figure = Figure(figsize=(8.5, 0.6 + 2.5 * len(groups)), layout="constrained")
    panels = figure.subplots(len(groups), 1, sharex=True, squeeze=False)[:, 0]
    _logarithmic(panels[-1], x_label)
    for axes, group in zip(panels, groups, strict=True):
        draw_lines(axes, [row for row in rows if row["label"] in group])
        _finish(axes)
    figure.supylabel(f"{title}, nats per token", size=10)
    return figure


def _labels(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row["label"] for row in rows))


def _finish(axes: Axes, title: str = "") -> None:
    if title:
        axes.set_title(title, size=10, loc="left")
    low, high = axes.get_ylim()
    if low < 0 < high:
        axes.axhline(0, color="black", lw=0.8, zorder=1)
    axes.grid(alpha=0.3)


def _logarithmic(axes: Axes, x_label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(LogLocator(base=2, numticks=10))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(_short)
    axes.set_xlabel(x_label)


def _ends(
    lines: Mapping[str, list[Row]], columns: tuple[str, str], looks: Mapping[str, Look]
) -> dict[str, tuple[float, str]]:
    """Where the lines end whose names stand beside them, and their colours."""
    ends = {}
    for label, line in lines.items():
        known = [mean for mean in _estimates(line, *columns)[0] if not math.isnan(mean)]
        if known:
            ends[label] = known[-1], looks[label]["color"]
    return ends


def _limit(axes: Axes, lines: Iterable[list[Row]]) -> None:
    """Show all means, and all intervals but those of bins with a share below FEW."""
    shown = [_estimates(line, *DIFFERENCE)[0] for line in lines]
    shown += [values for line in lines for values in _estimates(_frequent(line, FEW), *DIFFERENCE)]
    limits = np.concatenate(shown)
    limits = limits[~np.isnan(limits)]
    if limits.size and np.ptp(limits) > 0:
        margin = 0.05 * np.ptp(limits)
        axes.set_ylim(limits.min() - margin, limits.max() + margin)


def _frequent(line: list[Row], share: float) -> list[Row]:
    """The bins that hold at least this share of the tokens."""
    return [row for row in line if row["tokens"] >= share * sum(r["tokens"] for r in line)]


def _band(axes: Axes, rows: list[Row], columns: tuple[str, str], look: dict[str, Any]) -> None:
    """A line over the middles of bins, on a logarithmic axis; that of 0 is at 1/2."""
    places = [0.5 if (n := r["bin"]) == 0 else math.sqrt(2 ** (n - 1) * (2**n - 1)) for r in rows]
    means, low, high = _estimates(rows, *columns)
    axes.plot(places, means, ms=4, lw=1.2, **look)
    axes.fill_between(places, low, high, color=look["color"], alpha=0.2, lw=0)


def _estimates(rows: list[Row], mean: str, interval: str) -> np.ndarray:
    """(3, n): means and both ends of their intervals, NaN where JSON has null."""
    estimates = [[row[mean], *row[interval]] for row in rows]
    return np.array(estimates, dtype=np.float64).reshape(-1, 3).T


def _short(tokens: float, _: Any = None) -> str:
    """4096 as 4K."""
    if tokens < 1:
        return "0"
    return f"{tokens:g}" if tokens < 1024 else f"{tokens / 1024:g}K"
