"""Style of all plots: one palette, and labels at the ends of lines instead of a legend."""

import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from data.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, safe for colour-blind readers, without its yellow
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
PLAIN = "#999999"
MARKERS = "os^Dv<>"
LINES = ("-", "--", ":", "-.")

Styles = dict[str, dict[str, str]]  # colour, marker and line by label


def save(figure: "Figure", path: Path) -> None:
    """Write a figure as PNG, atomically."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    write_atomically(path, buffer.getvalue())


def styles_of(labels: Iterable[str]) -> Styles:
    """Assign a colour, marker and line style to each label. Equal labels get equal styles."""
    styles = {}
    for number, label in enumerate(dict.fromkeys(labels)):
        cycle, colour = divmod(number, len(COLOURS))
        styles[label] = {
            "color": COLOURS[colour],
            # shift the markers in each cycle, so that no pair of colour and marker repeats
            "marker": MARKERS[(colour + cycle) % len(MARKERS)],
            "linestyle": LINES[cycle % len(LINES)],
        }
    return styles


def name_ends(axes: "Axes", ends: Mapping[str, tuple[float, str]], gap: float = 0.06) -> None:
    """Label lines at their ends, to the right of a panel. Set the axis limits first.

    Args:
        axes: the panel.
        ends: by label, the y value at the end of its line and the colour of the label.
        gap: minimum distance between two labels, as a fraction of the panel's height.
    """
    from scipy.optimize import isotonic_regression  # slow to import: keeps --help fast

    heights = {
        name: axes.transAxes.inverted().transform(axes.transData.transform((1, y)))[1]
        for name, (y, _) in ends.items()
    }
    names = sorted(heights, key=lambda name: heights[name])
    moved = isotonic_regression([heights[name] - gap * n for n, name in enumerate(names)]).x
    moved = moved.clip(0, max(0, 1 - gap * (len(names) - 1)))
    for number, (name, height) in enumerate(zip(names, moved, strict=True)):
        style = {"transform": axes.transAxes, "va": "center", "fontsize": 9}
        axes.text(1.02, height + gap * number, name, color=ends[name][1], **style)
