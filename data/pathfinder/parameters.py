"""Parameters of Pathfinder images, and the dtype that stores images as lists of strokes.

The values are those of Long Range Arena's images (google-research/long-range-arena,
lra_benchmarks/data/pathfinder.py; drewlinsley/pathfinder, snakes2.py).
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

DIFFICULTIES = {"easy": 6, "intermediate": 9, "hard": 14}
"""Contour length of the benchmark's three difficulties."""

MIN_CONTOUR_LENGTH = 2
MAX_CONTOUR_LENGTH = 14


class Scale(NamedTuple):
    """Parameters that depend only on the size of the image; lengths in pixels."""

    border: int
    """Width of the strip along the image's edge in which no stroke may start."""
    seed_distance: int
    """Distance between the first strokes of the two contours. The first contour starts at least
    twice this far from the edge."""
    marker_radius: float
    stroke_length: int
    """Length of a stroke ("paddle" in the reference)."""
    thickness: float
    """Thickness of a stroke."""
    margins: tuple[int, ...]
    """Possible distances between strokes; each image draws one."""
    continuity: float
    """Straightness of contours: a turn by t radians has weight cos(continuity * t)^2, and weight 0
    if continuity * t exceeds pi/2."""
    target_gain: float
    """Brightness of the two contours, relative to a marker's 1."""
    distractor_gain: float
    """Brightness of the distractors; at size 32 above that of the contours, as released."""
    distractor_budget: int
    """Approximate number of strokes of all distractors together."""


_SCALES = {
    32: Scale(1, 7, 1.5, 2, 0.5, (1,), 1.0, 1.5, 2.0, 20),
    64: Scale(1, 12, 2.5, 5, 1.0, (1,), 1.8, 0.8, 0.8, 22),
    128: Scale(1, 20, 3.0, 5, 1.5, (2, 3), 1.8, 0.9, 0.9, 35),
    256: Scale(22, 27, 5.0, 5, 2.0, (3,), 1.8, 1.0, 1.0, 30),
}


@dataclass(frozen=True)
class Pathfinder:
    """Parameters of one kind of Pathfinder image.

    An image has two dashed contours of `contour_length` strokes among shorter distractors. Two of
    the four contour ends carry a marker. The label says whether both are ends of the same contour.

    Raises:
        ValueError: A field is out of range.
    """

    size: int
    """Height and width in pixels: 32, 64, 128 (Path-X) or 256 (Path-256)."""
    contour_length: int = DIFFICULTIES["hard"]
    """Strokes of each of the two contours, 2 to 14; 6, 9 and 14 are the benchmark's."""
    distractors_of: int | None = None
    """Contour length that determines the number and length of distractors; None: `contour_length`.

    Pathfinder(128, 3, distractors_of=14) draws short contours among the distractors of the hard
    images. With 0 there are no distractors."""

    def __post_init__(self) -> None:
        if self.size not in _SCALES:
            raise ValueError(
                f"size={self.size} must be one of {', '.join(map(str, _SCALES))}: the generator "
                "has no parameters for other sizes."
            )
        _check_length("contour_length", self.contour_length)
        if self.distractors_of:
            _check_length("distractors_of", self.distractors_of)

    @property
    def scale(self) -> Scale:
        """Parameters that depend only on `size`."""
        return _SCALES[self.size]

    @property
    def distractor_length(self) -> int:
        """Strokes per distractor: a third of the contour's, rounded down, at least one."""
        return max(1, self._distractors_of // 3)

    @property
    def n_distractors(self) -> int:
        """Number of distractors to try; an image has fewer if some find no room.

        A budget of strokes is divided by a third of the contour length. At size 32, both the third
        and the quotient are rounded down. At larger sizes, the third keeps its fraction, and the
        quotient is rounded up, so the last distractor may exceed the budget. Contours shorter than
        3 strokes count as 3.
        """
        if self._distractors_of == 0:
            return 0
        budget = self.scale.distractor_budget
        if self.size == 32:
            return budget // self.distractor_length
        return math.ceil(budget / max(1.0, self._distractors_of / 3))

    @property
    def max_strokes(self) -> int:
        """Maximum number of strokes of an image: both contours and all distractors."""
        return 2 * self.contour_length + self.n_distractors * self.distractor_length

    @property
    def _distractors_of(self) -> int:
        return self.contour_length if self.distractors_of is None else self.distractors_of


def display_list_dtype(parameters: Pathfinder) -> np.dtype:
    """Structured dtype of a stored image: strokes and markers, which render.py turns into pixels.

    Its fields take about 200 bytes in all:
        strokes: (max_strokes,) of (template uint16, y uint8, x uint8): the template of the stroke
            (see templates.py) and the pixel where it starts. The first contour comes first, then
            the second, then the distractors one after another. A contour runs from its origin end,
            where its first stroke starts, to its terminal end, where its last stroke starts.
            Entries from n_strokes on are zero.
        n_strokes: uint8.
        markers: (2, 2) uint8, the pixels (y, x) under the markers: first the one on a contour's
            origin end, then the one on a terminal end.
        label: uint8, 1 if both markers are on the same contour.
        margin: uint8, margin drawn for this image, in pixels.
        restarts: uint32, number of failed attempts at the two contours before the successful one.
    """
    stroke = np.dtype([("template", "<u2"), ("y", "u1"), ("x", "u1")])
    return np.dtype(
        [
            ("strokes", stroke, (parameters.max_strokes,)),
            ("restarts", "<u4"),
            ("markers", "u1", (2, 2)),
            ("n_strokes", "u1"),
            ("label", "u1"),
            ("margin", "u1"),
        ]
    )


def check_display_lists(display_lists: np.ndarray, parameters: Pathfinder) -> None:
    """Raise ValueError if display lists are from images with other parameters."""
    expected = display_list_dtype(parameters)
    if display_lists.dtype != expected:
        raise ValueError(
            f"display_lists has dtype {display_lists.dtype}, but {parameters} needs {expected}; "
            "pass the parameters with which they were generated."
        )


def _check_length(name: str, length: int) -> None:
    if not MIN_CONTOUR_LENGTH <= length <= MAX_CONTOUR_LENGTH:
        benchmark = ", ".join(f"{value} ({name})" for name, value in DIFFICULTIES.items())
        raise ValueError(
            f"{name}={length} must be between {MIN_CONTOUR_LENGTH} and {MAX_CONTOUR_LENGTH} "
            f"strokes; the benchmark's are {benchmark}."
        )
