"""The parameters of Pathfinder images, and how the images are stored as lists of strokes.

The numbers are those with which the Long Range Arena made its images (google-research/
long-range-arena, lra_benchmarks/data/pathfinder.py; drewlinsley/pathfinder, snakes2.py).
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
    """What depends on the size of the image alone; lengths in pixels."""

    border: int
    """Pixels along the image's edge that no stroke may start on."""
    seed_distance: int
    """Between the first strokes of the two contours; half of the room that the first contour keeps
    to the edge when it starts."""
    marker_radius: float
    stroke_length: int
    """Of a "paddle"."""
    thickness: float
    """Of strokes."""
    margins: tuple[int, ...]
    """What strokes keep from each other; each image draws one of these."""
    continuity: float
    """How straight contours are: a turn by t radians has weight cos(continuity * t)^2, and none
    where continuity * t is beyond pi/2."""
    target_gain: float
    """Brightness of the two contours; a marker has 1."""
    distractor_gain: float
    """Brightness of the distractors; brighter than the contours at size 32, as released."""
    distractor_budget: int
    """Strokes of all distractors together, about."""


_SCALES = {
    32: Scale(1, 7, 1.5, 2, 0.5, (1,), 1.0, 1.5, 2.0, 20),
    64: Scale(1, 12, 2.5, 5, 1.0, (1,), 1.8, 0.8, 0.8, 22),
    128: Scale(1, 20, 3.0, 5, 1.5, (2, 3), 1.8, 0.9, 0.9, 35),
    256: Scale(22, 27, 5.0, 5, 2.0, (3,), 1.8, 1.0, 1.0, 30),
}


@dataclass(frozen=True)
class Pathfinder:
    """One kind of Pathfinder images.

    Two dashed contours of `contour_length` strokes lie among shorter distractors, and two of the
    four contour ends carry a marker; the label says whether both ends are of one contour.

    Raises:
        ValueError: a field is out of range.
    """

    size: int
    """Height and width in pixels: 32, 64, 128 (Path-X) or 256 (Path-256)."""
    contour_length: int = DIFFICULTIES["hard"]
    """Strokes of each of the two contours, 2 to 14; 6, 9 and 14 are the benchmark's."""
    distractors_of: int | None = None
    """Number and length of the distractors are those that belong to this contour length; None is
    `contour_length` itself. Pathfinder(128, 3, distractors_of=14) draws short contours among the
    distractors of the hard images; with 0 there are no distractors."""

    def __post_init__(self) -> None:
        if self.size not in _SCALES:
            raise ValueError(
                f"size={self.size} must be one of {', '.join(map(str, _SCALES))}: the generator "
                "has parameters for these alone."
            )
        _check_length("contour_length", self.contour_length)
        if self.distractors_of:
            _check_length("distractors_of", self.distractors_of)

    @property
    def scale(self) -> Scale:
        """What depends on `size` alone."""
        return _SCALES[self.size]

    @property
    def distractor_length(self) -> int:
        """Strokes of each distractor: a third of the contour's, rounded down, at least one."""
        return max(1, self._distractors_of // 3)

    @property
    def n_distractors(self) -> int:
        """Distractors that are tried; an image has fewer where they find no room.

        A budget of strokes is divided by a third of the contour length. At size 32 that is the
        whole number of strokes and a whole division; above, the third keeps its fraction and the
        last distractor may overrun the budget. Contours below the benchmark's lengths count as 3.
        """
        if self._distractors_of == 0:
            return 0
        budget = self.scale.distractor_budget
        if self.size == 32:
            return budget // self.distractor_length
        return math.ceil(budget / max(1.0, self._distractors_of / 3))

    @property
    def max_strokes(self) -> int:
        """The most strokes an image has: both contours and all distractors."""
        return 2 * self.contour_length + self.n_distractors * self.distractor_length

    @property
    def _distractors_of(self) -> int:
        return self.contour_length if self.distractors_of is None else self.distractors_of


def display_list_dtype(parameters: Pathfinder) -> np.dtype:
    """How an image is stored: its strokes and markers, of which render.py makes the pixels.

    Fields of the structured dtype, about 200 bytes in all:
        strokes: (max_strokes,) of (template uint16, y uint8, x uint8), the template of the stroke
            (see templates.py) and the pixel where it starts. First the contours, the first one's
            strokes and then the second one's, each from its origin to its terminal end; then the
            distractors one after another. A contour's first stroke starts at the origin end and
            its last at the terminal end. Zero from n_strokes on.
        n_strokes: uint8.
        markers: (2, 2) uint8, the pixels (y, x) under the markers: on the origin end of one
            contour, then on the terminal end of one.
        label: uint8, 1 if both markers are on the same contour.
        margin: uint8, the margin drawn for this image, in pixels.
        restarts: uint32, how often the two contours did not fit and were begun anew; the number of
            attempts is one more.
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
    """Raise ValueError where display lists are of images with other parameters."""
    expected = display_list_dtype(parameters)
    if display_lists.dtype != expected:
        raise ValueError(
            f"display_lists has dtype {display_lists.dtype}, but {parameters} needs {expected}; "
            "pass the parameters that they were generated with."
        )


def _check_length(name: str, length: int) -> None:
    if not MIN_CONTOUR_LENGTH <= length <= MAX_CONTOUR_LENGTH:
        benchmark = ", ".join(f"{value} ({name})" for name, value in DIFFICULTIES.items())
        raise ValueError(
            f"{name}={length} must be between {MIN_CONTOUR_LENGTH} and {MAX_CONTOUR_LENGTH} "
            f"strokes; the benchmark's are {benchmark}."
        )
