"""How pictures look: one palette, lines that are named where they end; and how one is written."""

import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from data.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's, which people tell apart whatever colours they see, without their yellow
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
PLAIN = "#999999"
MARKERS = "os^Dv<>"
LINES = ("-", "--", ":", "-.")

Styles = dict[str, dict[str, str]]  # colour, marker and line by label


def save(figure: "Figure", path: Path) -> None:
    """Write a picture, whole or not at all."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    write_atomically(path, buffer.getvalue())


def styles_of(labels: Iterable[str]) -> Styles:
    """Colour, marker and line for each label, in their order; the same for the same labels."""
    looks = {}
    for number, label in enumerate(dict.fromkeys(labels)):
        turn, colour = divmod(number, len(COLOURS))
        looks[label] = {
            "color": COLOURS[colour],
            "marker": MARKERS[(colour + turn) % len(MARKERS)],  # moved on, so that no pair is twice
            "linestyle": LINES[turn % len(LINES)],
        }
    return looks


def name_ends(axes: "Axes", ends: Mapping[str, tuple[float, str]], gap: float = 0.06) -> None:
    """Write the names of lines to the right of a panel whose limits are final.

    Args:
        axes: the panel.
        ends: by name, where its line ends, in units of the y axis, and the colour of its name.
        gap: least distance of two names, as a share of the panel's height.
    """
    from scipy.optimize import isotonic_regression  # slow to load: --help should not wait for it

    heights = {
        name: axes.transAxes.inverted().transform(axes.transData.transform((1, y)))[1]
        for name, (y, _) in ends.items()
    }
    names = sorted(heights, key=lambda name: heights[name])
    moved = isotonic_regression([heights[name] - gap * n for n, name in enumerate(names)]).x
    moved = moved.clip(0, max(0, 1 - gap * (len(names) - 1)))
    for number, (name, height) in enumerate(zip(names, moved, strict=True)):
        at = {"transform": axes.transAxes, "va": "center", "fontsize": 9}
        axes.text(1.02, height + gap * number, name, color=ends[name][1], **at)
