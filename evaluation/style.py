"""How pictures look: the colours, markers and lines of what is compared; and how one is written."""

import io
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from data.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's, which people tell apart whatever colours they see; without their yellow
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "os^Dv<>"
LINES = ("-", "--", ":", "-.")
IN_A_ROW = len(COLOURS) - 1  # models beside the first, which alone has its colour

Styles = dict[str, dict[str, str]]  # colour, marker and line by label


def save(figure: "Figure", path: Path) -> None:
    """Write a picture, whole or not at all."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    write_atomically(path, buffer.getvalue())


def styles_of(labels: Iterable[str]) -> Styles:
    """Colour, marker and line for each label, in their order; the same for the same labels.

    The colour of the first, which others are compared with, does not come again.
    """
    looks = {}
    for number, label in enumerate(dict.fromkeys(labels)):
        turn, colour = (0, 0) if number == 0 else divmod(number - 1, IN_A_ROW)
        colour += number > 0
        looks[label] = {
            "color": COLOURS[colour],
            "marker": MARKERS[(colour + turn) % len(MARKERS)],  # moved on, so that no pair is twice
            "linestyle": LINES[turn % len(LINES)],
        }
    return looks
