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
from evaluation.style import COLOURS, LINES, Styles, save, styles_of

IN_A_ROW = len(COLOURS) - 1  # models beside the first
FEW = 0.01  # a bin with a smaller share of the tokens does not widen a panel by its interval
RARE = 0.001  # a bin with a smaller share is not drawn where only differences are
SHIFT = 0.05  # between models of one history, in doublings, so that all intervals are seen
DIFFERENCE = "difference", "difference_interval"  # columns of a mean and its interval


def draw(result: dict[str, Any], folder: Path) -> None:
    """Draw FOLDER/TABLE.png of each table of `result`, and delete pictures that have none."""
    styles = styles_of(run["label"] for run in result["runs"])
    for name, make in PICTURES.items():
        path = folder / f"{name}.png"
        if result[name]:
            save(make(result[name], styles), path)
            print(f"drew {path}")
        else:
            path.unlink(missing_ok=True)


def by_history(rows: list[Row], styles: Styles) -> Figure:
    """Loss by the history of a window; on the right its difference to the first model.

    A line is one model; where a history has several strides or document masks, one of these.
    """
    ways = {(row["label"], row["history"], row["document_mask"]) for row in rows}
    strides = sorted({row["stride"] for row in rows}) if len(ways) < len(rows) else []

    def draw_lines(rows: list[Row], *panels: Axes) -> None:
        lines: dict[tuple[str, int | None, bool], list[Row]] = {}
        for row in rows:
            line = row["label"], row["stride"] if strides else None, row["document_mask"]
            lines.setdefault(line, []).append(row)
        for number, ((label, stride, masked), line) in enumerate(lines.items()):
            look: dict[str, Any] = {**styles[label], "label": label}
            if stride is not None:
                look["label"] += f", stride {stride:,}"
                look["linestyle"] = LINES[strides.index(stride) % len(LINES)]
            if masked:
                look |= {"label": f"{look['label']}, documents masked", "markerfacecolor": "white"}
            shift = 2 ** (SHIFT * (number - (len(lines) - 1) / 2))
            histories = shift * np.array([row["history"] for row in line])
            # what others are compared with stands at zero; some are compared with nothing
            end = 0 if label == rows[0]["label"] else math.nan
            gaps = [row["difference"] or {"nats": end, "interval": [end, end]} for row in line]
            drawn = _estimates(line, "nats", "nats_interval"), _estimates(gaps, "nats", "interval")
            for axes, (means, low, high) in zip(panels, drawn, strict=False):
                errors = np.maximum(0, [means - low, high - means])  # means of few may lie outside
                axes.errorbar(histories, means, errors, ms=5, lw=1.2, capsize=3, **look)

    two = any(row["difference"] for row in rows)
    figure = _rows_of_panels(rows, two, "tokens that the model may see", draw_lines)
    for axes in figure.axes:
        axes.set_xticks(sorted({row["history"] for row in rows}))
        axes.margins(x=0.1)
    return figure


def by_bin(rows: list[Row], styles: Styles, *, x_label: str) -> Figure:
    """Loss over the middles of logarithmic bins; on the right its difference to the first model."""

    def draw_lines(rows: list[Row], loss: Axes, *differences: Axes) -> None:
        lines = {label: [row for row in rows if row["label"] == label] for label in _labels(rows)}
        for label, line in lines.items():
            look = {**styles[label], "label": label}
            _band(loss, line, ("nats", "interval"), look)
            for axes in differences:
                _band(axes, line, DIFFERENCE, look)
        for axes in differences:
            _limit(axes, lines.values())

    return _rows_of_panels(rows, len(_labels(rows)) > 1, x_label, draw_lines)


def differences_by_bin(panels: Mapping[str, Mapping[str, list[Row]]], x_label: str) -> Figure:
    """Differences over the middles of logarithmic bins: by panel, the rows of each line."""
    columns = min(2, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(6 * columns, 5 * rows), layout="constrained")
    for number, (title, lines) in enumerate(panels.items(), start=1):
        axes = figure.add_subplot(rows, columns, number)
        styles = styles_of(lines)
        for label, line in lines.items():
            look = {**styles[label], "label": label}
            _band(axes, _frequent(line, RARE), DIFFERENCE, look)
        axes.axhline(0, color="black", lw=0.8, zorder=1)
        axes.set_title(title)
        axes.set_ylabel("difference, nats per token")
        axes.legend(fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.12))
        _logarithmic(axes, x_label)
    return figure


PICTURES: dict[str, Callable[[list[Row], Styles], Figure]] = {
    "strided": by_history,
    "chunk_position": partial(by_bin, x_label="position in the window"),
    "document_position": partial(by_bin, x_label="tokens before the scored one in its document"),
    "document_length": partial(by_bin, x_label="tokens of the document"),
}


def _rows_of_panels(
    rows: list[Row], two: bool, x_label: str, draw_lines: Callable[..., None]
) -> Figure:
    """A panel for the loss, and one for its difference to the first model if there are `two`.

    More models than can be told apart go to further rows of panels, each with the first of all.
    """
    first, *others = _labels(rows)
    groups = [others[at : at + IN_A_ROW] for at in range(0, len(others), IN_A_ROW)] or [[]]
    figure = Figure(figsize=(11 if two else 6.5, 4.5 * len(groups)), layout="constrained")
    parts = figure.subfigures(len(groups), 1, squeeze=False)[:, 0]
    for part, group in zip(parts, groups, strict=True):
        loss, *differences = part.subplots(1, 1 + two, squeeze=False)[0]
        draw_lines([row for row in rows if row["label"] in (first, *group)], loss, *differences)
        loss.set_ylabel("loss, nats per token")
        for axes in differences:
            axes.set_ylabel(f"difference to {first}, nats per token")
            axes.axhline(0, color="black", lw=0.8, zorder=1)
        for axes in part.axes:
            _logarithmic(axes, x_label)
        handles, names = loss.get_legend_handles_labels()
        columns = min(3, len(names))
        part.legend(handles, names, loc="outside upper center", ncols=columns, fontsize=9)
    return figure


def _labels(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row["label"] for row in rows))


def _logarithmic(axes: Axes, x_label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(LogLocator(base=2, numticks=10))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(_short)
    axes.set_xlabel(x_label)
    axes.grid(alpha=0.3)


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
