"""Plots of an evaluation, drawn from the tables of evaluation/tables.py."""

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

MODELS_PER_PANEL = 4  # overlapping intervals of more models are unreadable
MIN_SHARE_FOR_LIMITS = 0.01  # intervals of bins with a smaller share of the tokens may be cut off
MIN_SHARE_DRAWN = 0.001  # bins with a smaller share of the tokens are not drawn
SHIFT = 0.05  # log2 offset between models at the same history: keeps their intervals apart
LOSS = "nats", "interval"  # keys of a mean and its interval
DIFFERENCE = "difference", "difference_interval"

Style = dict[str, Any]  # colour, marker and line style of a model


def draw(result: dict[str, Any], folder: Path) -> None:
    """Draw each table of `result` as FOLDER/TABLE.png. Pictures of empty tables are deleted.

    Plots show differences to the first model, or losses if there is only one model.
    """
    styles = _styles(dict.fromkeys(run["label"] for run in result["runs"]))
    for name, plot in PICTURES.items():
        path = folder / f"{name}.png"
        if result[name]:
            save(plot(result[name], styles), path)
            print(f"drew {path}")
        else:
            path.unlink(missing_ok=True)


def by_history(rows: list[Row], styles: Mapping[str, Style]) -> Figure:
    """Plot differences to the first model at its longest history, by the history of a window.

    Each line is one model, split by stride and document mask if there are several.
    """
    cases = {(row["label"], row["history"], row["document_mask"]) for row in rows}
    strides = sorted({row["stride"] for row in rows}) if len(cases) < len(rows) else []
    compared = any(row["difference"] for row in rows)
    all_histories = sorted({row["history"] for row in rows})

    def difference(row: Row) -> Row:
        # the reference is at zero; rows of other models without a difference are not drawn
        value = 0 if row["label"] == rows[0]["label"] else math.nan
        return row["difference"] or {"nats": value, "interval": [value, value]}

    def draw_lines(axes: Axes, rows: list[Row]) -> None:
        lines: dict[tuple[str, int | None, bool], list[Row]] = {}
        for row in rows:
            line = row["label"], row["stride"] if strides else None, row["document_mask"]
            lines.setdefault(line, []).append(row)
        ends = {}
        for number, ((label, stride, masked), line) in enumerate(lines.items()):
            style, name = dict(styles[label]), label
            if stride is not None:
                name += f", stride {stride:,}"
                style["linestyle"] = LINES[strides.index(stride) % len(LINES)]
            if masked:
                name += ", documents masked"
                style["markerfacecolor"] = "white"
            columns = LOSS if compared else ("nats", "nats_interval")
            values = [difference(r) for r in line] if compared else line
            means, low, high = _estimates(values, *columns)
            shift = 2 ** (SHIFT * (number - (len(lines) - 1) / 2))
            histories = shift * np.array([row["history"] for row in line])
            # the mean of a few documents may be outside its interval
            errors = np.maximum(0, [means - low, high - means])
            axes.errorbar(histories, means, errors, ms=5, lw=1.5, capsize=3, **style)
            if not np.isnan(means[-1]):
                ends[name] = means[-1], style["color"]
        axes.set_xticks(all_histories)
        axes.margins(x=0.1)
        name_ends(axes, ends, gap=0.09)

    reference = [row for row in rows if row["label"] == rows[0]["label"]]
    # a single row of the first model is only the zero line
    draws_reference = not compared or len(reference) > 1
    drawn = rows if draws_reference else [row for row in rows if row not in reference]
    title = f"difference to {rows[0]['label']}" if compared else "loss"
    return _panels(drawn, draw_lines, title, "tokens that the model may see")


def by_bin(rows: list[Row], styles: Mapping[str, Style], *, x_label: str) -> Figure:
    """Plot differences to the first model over the middles of logarithmic bins."""
    first, *others = _labels(rows)
    columns = DIFFERENCE if others else LOSS

    def draw_lines(axes: Axes, rows: list[Row]) -> None:
        lines = {
            label: _frequent([row for row in rows if row["label"] == label], MIN_SHARE_DRAWN)
            for label in _labels(rows)
        }
        for label, line in lines.items():
            _band(axes, line, columns, styles[label])
        if others:
            _limit(axes, lines.values())
        name_ends(axes, _ends(lines, columns, styles), gap=0.09)

    drawn = [row for row in rows if row["label"] != first] if others else rows
    return _panels(drawn, draw_lines, f"difference to {first}" if others else "loss", x_label)


def differences_by_bin(panels: Mapping[str, Mapping[str, list[Row]]], x_label: str) -> Figure:
    """Plot differences over the middles of logarithmic bins.

    `panels` maps the title of each panel to the rows of each line, by label.
    """
    figure = Figure(figsize=(8.5, 0.5 + 2.4 * len(panels)), layout="constrained")
    grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (title, lines) in zip(grid, panels.items(), strict=True):
        styles = _styles(["", *lines])
        shown = {label: _frequent(line, MIN_SHARE_DRAWN) for label, line in lines.items()}
        for label, line in shown.items():
            _band(axes, line, DIFFERENCE, styles[label])
        _finish(axes, title)
        name_ends(axes, _ends(shown, DIFFERENCE, styles), gap=0.16)
    _logarithmic(grid[-1], x_label)
    figure.supylabel("difference, nats per token", size=10)
    return figure


PICTURES: dict[str, Callable[[list[Row], Mapping[str, Style]], Figure]] = {
    "strided": by_history,
    "chunk_position": partial(by_bin, x_label="position in the window"),
    "document_position": partial(by_bin, x_label="tokens before the scored one in its document"),
    "document_length": partial(by_bin, x_label="tokens of the document"),
}


def _styles(labels: Iterable[str]) -> dict[str, Style]:
    """Assign colours and markers to models. Only the first, the reference, is grey."""
    first, *others = labels
    styles = {first: {"color": PLAIN, "marker": MARKERS[-1]}}
    for number, label in enumerate(others):
        index = number % len(COLOURS)
        styles[label] = {"color": COLOURS[index], "marker": MARKERS[index]}
    return styles


def _panels(
    rows: list[Row], draw_lines: Callable[[Axes, list[Row]], None], title: str, x_label: str
) -> Figure:
    """Stack panels of up to MODELS_PER_PANEL models each."""
    labels = _labels(rows)
    starts = range(0, len(labels), MODELS_PER_PANEL)
    groups = [labels[start : start + MODELS_PER_PANEL] for start in starts]
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
    lines: Mapping[str, list[Row]], columns: tuple[str, str], styles: Mapping[str, Style]
) -> dict[str, tuple[float, str]]:
    """Y value at the end of each line, and the colour of its label, for `name_ends`."""
    ends = {}
    for label, line in lines.items():
        known = [mean for mean in _estimates(line, *columns)[0] if not math.isnan(mean)]
        if known:
            ends[label] = known[-1], styles[label]["color"]
    return ends


def _limit(axes: Axes, lines: Iterable[list[Row]]) -> None:
    """Fit the y axis to all means, and to the intervals of bins above MIN_SHARE_FOR_LIMITS."""
    values = [_estimates(line, *DIFFERENCE)[0] for line in lines]
    for line in lines:
        values += [*_estimates(_frequent(line, MIN_SHARE_FOR_LIMITS), *DIFFERENCE)]
    limits = np.concatenate(values)
    limits = limits[~np.isnan(limits)]
    if limits.size and np.ptp(limits) > 0:
        margin = 0.05 * np.ptp(limits)
        axes.set_ylim(limits.min() - margin, limits.max() + margin)


def _frequent(line: list[Row], share: float) -> list[Row]:
    """Bins with at least this share of the tokens."""
    return [row for row in line if row["tokens"] >= share * sum(r["tokens"] for r in line)]


def _band(axes: Axes, rows: list[Row], columns: tuple[str, str], style: dict[str, Any]) -> None:
    """Draw a line with its interval over the middles of bins. Bin 0 is at 1/2 on the log axis."""
    middles = [0.5 if (n := r["bin"]) == 0 else math.sqrt(2 ** (n - 1) * (2**n - 1)) for r in rows]
    means, low, high = _estimates(rows, *columns)
    axes.plot(middles, means, ms=4, lw=1.2, **style)
    axes.fill_between(middles, low, high, color=style["color"], alpha=0.2, lw=0)


def _estimates(rows: list[Row], mean: str, interval: str) -> np.ndarray:
    """(3, n) array: means and both ends of their intervals, NaN for null in JSON."""
    estimates = [[row[mean], *row[interval]] for row in rows]
    return np.array(estimates, dtype=np.float64).reshape(-1, 3).T


def _short(tokens: float, _: Any = None) -> str:
    """Format 4096 as 4K."""
    if tokens < 1:
        return "0"
    return f"{tokens:g}" if tokens < 1024 else f"{tokens / 1024:g}K"
