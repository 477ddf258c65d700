"""Pictures of the rows of experiments.attention."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from evaluation.results import Row
from evaluation.style import PLAIN, name_ends
from experiments.attention.report import PASSES, approximate_name, fastest, right_rows
from experiments.reports import display_name
from experiments.style import OUR_SPARSE, OURS, approximate_line, line_of


def draw_peers(rows: list[Row]) -> Figure:
    """Draw TFLOP/s of dense attention over length: a panel per pass, mask and head dimension.

    Lengths without a peer are left out. A cross marks out of memory.
    """
    return _over_length([row for row in rows if row["mask"] == "dense"], "tflops", "TFLOP/s")


def draw_fastest(rows: list[Row]) -> Figure:
    """Draw what `draw_peers` does of --preset hopper, for the rows of `fastest`."""
    return draw_peers(fastest(rows))


def draw_butterflies(rows: list[Row]) -> Figure:
    """Draw the time of a full butterfly over length, relative to density x Papilio's dense time."""
    butterflies = [
        row
        for row in rows
        if row["mask"] == "butterfly"  # the longest has no dense time
        and (row["status"] != "ok" or "forward_over_proportional" in row)
    ]
    return _over_length(butterflies, "over_proportional", "time / (density x dense time)")


def _over_length(rows: list[Row], quantity: str, unit: str) -> Figure:
    """Draw a quantity of each pass over all lengths that a peer ran."""
    lengths = sorted({row["seq_len"] for row in rows if row["name"] != "ours"})
    rows = [row for row in rows if row["seq_len"] in lengths]
    panels = sorted({(not row["causal"], row["head_dim"]) for row in rows})
    figure = Figure(figsize=(9.5, 6), layout="constrained")
    grid = figure.subplots(2, len(panels), sharex=True, sharey=True, squeeze=False)
    lines = {}
    for column, (full, head_dim) in zip(grid.T, panels, strict=True):
        panel = [r for r in rows if (not r["causal"], r["head_dim"]) == (full, head_dim)]
        column[0].set_title(f"{'full' if full else 'causal'}, head_dim {head_dim}", size=10)
        for axes, part in zip(column, PASSES, strict=True):
            for name in dict.fromkeys(row["name"] for row in panel):
                own, look = [row for row in panel if row["name"] == name], line_of(name)
                lines[display_name(name)] = _plot(axes, right_rows(own), f"{part}_{quantity}", look)
                for row in (row for row in own if row["status"] == "out of memory"):
                    at, colour = (row["seq_len"], 0), look["color"]
                    axes.plot(*at, "x", ms=7, mew=2, color=colour, clip_on=False)
                    above = {"xytext": (0, 7), "textcoords": "offset points", "ha": "center"}
                    axes.annotate("OOM", at, **above, fontsize=8, color=colour)
            axes.margins(x=0.1)
            _over_lengths(axes, lengths)
    grid[0, 0].set_ylim(bottom=0)
    figure.supxlabel("tokens", size=10)
    for part, axes in zip(PASSES, grid[:, 0], strict=True):
        axes.set_ylabel(f"{part}\n{unit}")
    figure.legend(lines.values(), lines, loc="outside upper center", ncols=4, frameon=False)
    return figure


def _plot(axes: Axes, rows: list[Row], key: str, look: dict[str, Any]) -> Line2D:
    """Plot a quantity of rows over their length."""
    x, y = ([row[name] for row in rows] for name in ("seq_len", key))
    return axes.plot(x, y, marker="o", ms=4, **look)[0]


def _over_lengths(axes: Axes, lengths: list[int]) -> None:
    """Set a logarithmic x axis with these lengths as ticks."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{n // 1024}K" if n >= 1024 else str(n) for n in lengths])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(alpha=0.3)


def draw_paper(rows: list[Row]) -> Figure:
    """Draw time and memory over length for the plain variant, as in Figure 3."""
    lines: dict[tuple[str, bool], list[Row]] = {}
    ends_early = set()
    for row in rows:
        line = row["name"], row["mask"] != "dense"
        if row["variant"] == "plain" and row["status"] == "ok":
            lines.setdefault(line, []).append(row)
        elif row["status"] == "out of memory":
            ends_early.add(line)
    figure = Figure(figsize=(8.5, 4), layout="constrained")
    panels = {"both_ms": "forward and backward, ms", "peak_mib": "peak memory, MiB"}
    for axes, (key, title) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        ends = {}
        for (name, sparse), line in lines.items():
            look = line_of(name, sparse=sparse)
            early = (name, sparse) in ends_early
            _plot(axes, line, key, look)
            name = display_name(name)
            name += ",\nblock-sparse" if sparse else ",\nthen OOM" * early
            ends[name] = line[-1][key], look["color"]
        axes.set_yscale("log")
        _over_lengths(axes, sorted({r["seq_len"] for line in lines.values() for r in line})[::3])
        axes.set_title(title, size=10)
        axes.set_xlabel("tokens")
        name_ends(axes, ends, gap=0.09)
    return figure


def draw_approximate(rows: list[Row]) -> Figure:
    """Draw time and memory over length: approximations, and Papilio's exact and sparse attention.

    Lines of compiled approximations are dashed. Causal rows are left out, except for the
    approximation that is always causal.
    """
    lines: dict[str, list[Row]] = {}
    for row in sorted(right_rows(rows), key=lambda row: row["seq_len"]):
        if not row["causal"] or row["name"] != "ours":
            lines.setdefault(approximate_name(row), []).append(row)
    figure = Figure(figsize=(12, 6), layout="constrained")
    panels = {"both_ms": "forward and backward, ms", "peak_mib": "peak memory, MiB"}
    for axes, (key, title) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        ends = {}
        for name, line in lines.items():
            _plot(axes, line, key, look := approximate_line(name))
            if not name.endswith("compiled"):
                ends[name] = line[-1][key], look["color"]
        axes.set_yscale("log")
        _over_lengths(axes, sorted({row["seq_len"] for row in rows})[::3])
        axes.set_title(title, size=10)
        axes.set_xlabel("tokens")
        name_ends(axes, ends, gap=0.05)
    return figure


def draw_sparsity(rows: list[Row]) -> Figure:
    """Draw time over density, with the line of proportionality."""
    looks = {"dense": ("o", OURS), "butterfly": ("o", OUR_SPARSE), "window": ("^", OUR_SPARSE)}
    figure = Figure(figsize=(8.5, 3.8), layout="constrained")
    for axes, part in zip(figure.subplots(1, 2), PASSES, strict=True):
        for pattern, (marker, colour) in looks.items():
            own = [row for row in right_rows(rows) if row["mask"].split()[0] == pattern]
            x, y = ([row[name] for row in own] for name in ("density", f"{part}_ms"))
            axes.plot(x, y, marker, color=colour, ms=7, label=f"Papilio, {pattern}")
            if pattern == "dense" and own:
                axes.plot([0, 1], [0, y[0]], ":", color=PLAIN, label="proportional to density")
        axes.set(xlabel="density (share of visible blocks)", ylabel=f"{part}, ms")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.axes[0].legend(frameon=False)
    return figure
