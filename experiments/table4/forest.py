"""Forest plot: effects of a longer context and of a butterfly mask, with 95% intervals."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evaluation.results import Row
from experiments.harness import Result
from experiments.reports import tokens_text
from experiments.style import OUR_SPARSE, OURS
from experiments.table4.questions import by_pair

LIMIT = 0.17
"""Half width of the axis, nats. An arrow marks a difference beyond it."""
COLUMNS = 1.18, 1.37  # x of the two number columns, right of the panel

BUTTERFLY = "Butterfly mask instead of dense attention"
ROWS = {
    "1K grows to 4K within one run, equal tokens": {
        "instead of 1K": ("1k_to_4k", "1k"),
        "instead of 4K": ("1k_to_4k", "4k"),
        "instead of two runs": ("1k_to_4k_longer", "1k_then_4k"),
    },
    "1K model continued at 4K instead of 1K": {
        "equal tokens": ("1k_then_4k", "1k_then_1k"),
        "equal time": ("1k_then_4k", "1k_then_1k_same_time"),
    },
    "1K model continued at 16K, equal tokens": {
        "instead of 1K": ("1k_then_16k", "1k_then_1k"),
        "instead of 4K": ("1k_then_16k", "1k_then_4k"),
    },
    "Trained from scratch, instead of at 1K": {
        "2K, equal tokens": ("2k", "1k"),
        "4K, equal tokens": ("4k", "1k"),
        "8K, equal tokens": ("8k", "1k"),
        "16K, equal tokens": ("16k", "1k"),
        "4K, equal time": ("4k", "1k_same_time"),
    },
    "1K, then 4K, instead of 4K from scratch": {"equal time": ("4k_from_1k", "4k")},
    BUTTERFLY: {
        "4K from scratch, equal tokens": ("4k_butterfly", "4k"),
        "4K from scratch, equal time": ("4k_butterfly_same_time", "4k"),
        "16K from scratch, equal tokens": ("16k_butterfly", "16k"),
        "16K from scratch, equal time": ("16k_butterfly_same_time", "16k"),
        "1K continued at 16K, equal tokens": ("1k_then_16k_butterfly", "1k_then_16k"),
        "1K continued at 16K, equal time": ("1k_then_16k_butterfly_same_time", "1k_then_16k"),
    },
}
"""Pairs of models by group title and row label: the model, then its baseline."""


def differences(result: Result) -> dict[tuple[str, str], Row]:
    """Differences on identical tokens by pair of models, from a result with one corpus."""
    return {pair: row["strided"] for pair, row in by_pair(result).items()}


def draw(larger: Result, smaller: Result) -> Figure:
    """Draw one row per comparison: the larger budget filled, the smaller one open."""
    gaps = [differences(result) for result in (larger, smaller)]
    groups = {
        title: {
            label: [by_budget.get(pair) for by_budget in gaps]
            for label, pair in rows.items()
            if any(pair in by_budget for by_budget in gaps)
        }
        for title, rows in ROWS.items()
    }
    names = [_name(result) for result in (larger, smaller)]
    headings = [name.split()[0] for name in names]
    return draw_effects(groups, names, headings, limit=LIMIT)


def draw_effects(
    groups: Mapping[str, Mapping[str, Sequence[Row | None]]],
    names: Sequence[str],
    headings: Sequence[str],
    *,
    limit: float,
) -> Figure:
    """Draw differences with intervals, one line each; empty groups are left out.

    Args:
        groups: by title and label, two differences (nats, interval) or None: the first is drawn
            filled, the second open.
        names: of the two, for the legend.
        headings: of the two, for the columns of numbers.
        limit: half width of the axis, nats. An arrow marks a difference beyond it.
    """
    groups = {title: rows for title, rows in groups.items() if rows}
    n_lines = sum(1 + len(rows) for rows in groups.values())
    height = 1.3 + 0.3 * n_lines
    figure = Figure(figsize=(8.5, height))
    axes = figure.add_axes((0.44, 0.6 / height, 0.4, 1 - 1.1 / height))
    axes.set(xlim=(-limit, limit), ylim=(n_lines - 0.3, -1.2), yticks=[])
    axes.set_xlabel("better  ←   nats per token, 95% interval   →  worse")
    axes.axvline(0, color="black", lw=1)
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["left", "right", "top"]].set_visible(False)

    def write(column: float, line: float, text: str, **look: Any) -> None:
        """Write text next to the panel; `column` is in units of its width."""
        at = {"transform": axes.get_yaxis_transform(), "va": "center"}
        axes.text(column, line, text, **at, **look)

    line = 0
    for column, heading in zip(COLUMNS, headings, strict=True):
        write(column, -0.8, heading, ha="right")
    for title, rows in groups.items():
        write(-1.08, line, title, weight="bold")
        for label, gaps in rows.items():
            line += 1
            write(-1.04, line, label)
            colour = OUR_SPARSE if title == BUTTERFLY else OURS
            for number, gap in enumerate(gaps):
                if gap is not None:
                    y = line + 0.3 * number - 0.15
                    _mark(axes, gap, y, colour, limit, filled=number == 0)
                    write(COLUMNS[number], line, f"{gap['nats']:+z.3f}", ha="right")
        line += 1
    handles = [
        axes.errorbar([], [], fmt="o", mfc=colour, color="black", label=name)
        for colour, name in zip(("black", "white"), names, strict=True)
    ]
    figure.legend(handles=handles, loc="upper center", ncols=2, frameon=False)
    return figure


def _name(result: Result) -> str:
    """Legend entry: tokens of training from scratch, and the number of seeds."""
    (models,) = result["rows"].values()
    seeds = models[0]["seeds"]
    return f"{tokens_text(models[0]['tokens'])} training tokens, {seeds} seed{'s' * (seeds > 1)}"


def _mark(axes: Axes, gap: Row, y: float, colour: str, limit: float, *, filled: bool) -> None:
    """Draw a mean with its interval, or an arrow if the mean is off the axis."""
    nats, (low, high) = gap["nats"], gap["interval"]
    if abs(nats) > limit:
        side = limit if nats > 0 else -limit
        tip = {"arrowstyle": "->", "color": colour, "lw": 1.5}
        axes.annotate("", (side, y), (0.8 * side, y), arrowprops=tip)
        return
    look = {"color": colour, "mfc": colour if filled else "white", "ms": 5, "capsize": 2}
    axes.errorbar([nats], [y], xerr=[[nats - low], [high - nats]], fmt="o", lw=1.5, **look)
