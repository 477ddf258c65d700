"""What a viewer sees at the two markers of Pathfinder images.

The order of the markers says nothing to a viewer. Swapping rows and columns changes nothing either,
but turning and mirroring would: the generator rounds coordinates up, so contours drift down and to
the right, and a classifier can use that.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from data.lra.store import DisplayLists, open_split
from data.pathfinder.geometry import endpoint_geometry
from data.pathfinder.parameters import Pathfinder

PREDICTIONS = Path("out/pathfinder_yardsticks")
"""Where yardsticks.py keeps what it says of each image, which tracing.py reads."""

_POSITIONS = ("row_a", "column_a", "row_b", "column_b")
_TANGENTS = ("row_direction_a", "column_direction_a", "row_direction_b", "column_direction_b")


ALL = "all endpoint geometry"
KNOWLEDGE: dict[str, tuple[str, ...]] = {
    "distance": ("distance",),
    "distance and positions": ("distance", *_POSITIONS),
    "distance and one direction": ("distance", "size_of_turn_a"),
    "distance and both directions": ("distance", "folded_turn_a", "folded_turn_b"),
    ALL: (
        *("distance", *_POSITIONS, "row_difference", "column_difference"),
        *("turn_a", "turn_b", "folded_turn_a", "folded_turn_b", *_TANGENTS),
    ),
}
"""What a classifier may know: names of features that `features` gives. One direction is that at a
marker of which nobody says whether a contour begins or ends there."""


@dataclass(frozen=True)
class Endpoints:
    """Markers of N images; the order of the two is that of the generator, origin end first."""

    labels: np.ndarray
    """(N,) uint8, 1 where both are on one contour."""
    positions: np.ndarray
    """(N, 2, 2) float64, (y, x) in pixels from the middle of the image."""
    directions: np.ndarray
    """(N, 2, 2) float64, unit vectors (y, x) along which the contour leaves each marker."""
    period: float
    """Pixels from the start of one stroke of a contour to that of the next, mean over margins."""

    def __len__(self) -> int:
        return len(self.labels)

    def swapped(self) -> "Endpoints":
        """These endpoints with the markers in the other order."""
        return replace(self, positions=self.positions[:, ::-1], directions=self.directions[:, ::-1])

    def transposed(self, which: ArrayLike = True) -> "Endpoints":
        """Endpoints with rows and columns swapped, in all images or in `which`, (N,) bool."""
        swap, ways = np.reshape(which, (-1, 1, 1)), (self.positions, self.directions)
        positions, directions = (np.where(swap, points[..., ::-1], points) for points in ways)
        return replace(self, positions=positions, directions=directions)


def open_contours(folder: Path, split: str) -> tuple[DisplayLists, Pathfinder]:
    """A split of a prepared task of generated Pathfinder images, and their parameters.

    Raises:
        ValueError, FileNotFoundError: the folder holds none.
    """
    opened = open_split(folder, split)
    if not isinstance(opened, DisplayLists):
        raise ValueError(
            f"{folder} holds {opened.manifest.kind}, which do not tell where contours end; prepare "
            "the task without --source, so that its images are generated."
        )
    return opened, Pathfinder(**opened.manifest.source["parameters"])


def read_endpoints(folder: Path, split: str) -> Endpoints:
    """Markers of a split of a prepared task; raises as `open_contours` does."""
    opened, parameters = open_contours(folder, split)
    positions, directions = endpoint_geometry(opened.display_lists, parameters)
    return Endpoints(
        labels=np.array(opened.labels),
        positions=positions - (parameters.size - 1) / 2,
        directions=np.stack([np.sin(directions), np.cos(directions)], axis=-1),
        period=parameters.scale.stroke_length + 2 * float(np.mean(parameters.scale.margins)),
    )


def views(endpoints: Endpoints) -> Iterator[Endpoints]:
    """Images from either marker, each transposed where that one is below the diagonal."""
    for view in (endpoints, endpoints.swapped()):
        first = view.positions[:, 0]
        yield view.transposed(first[:, 0] > first[:, 1])


def features(endpoints: Endpoints) -> dict[str, np.ndarray]:
    """Float64 arrays (N,) by name; a is the first marker, b the second one.

    Lengths are in pixels, and a turn is the angle in (-pi, pi] from the line to the other marker to
    the contour. A mirrored image has both turns with the other sign, and seen from the other marker
    they change places: folded turns, |a| <= b, are the same for all of these.
    """
    positions, directions = endpoints.positions, endpoints.directions
    line = positions[:, 1] - positions[:, 0]
    towards = np.arctan2(line[:, 0], line[:, 1])
    angles = np.arctan2(directions[..., 0], directions[..., 1])
    turn_a, turn_b = _wrap(angles[:, 0] - towards), _wrap(angles[:, 1] - towards - np.pi)
    a_is_less = np.abs(turn_a) <= np.abs(turn_b)
    less, more = np.where(a_is_less, turn_a, turn_b), np.where(a_is_less, turn_b, turn_a)
    found = {
        "distance": np.hypot(line[:, 0], line[:, 1]),
        "row_difference": line[:, 0],
        "column_difference": line[:, 1],
        "turn_a": turn_a,
        "turn_b": turn_b,
        "size_of_turn_a": np.abs(turn_a),
        "folded_turn_a": np.where(more < 0, -less, less),
        "folded_turn_b": np.abs(more),
    }
    for names, values in ((_POSITIONS, positions), (_TANGENTS, directions)):
        found |= zip(names, values.reshape(-1, 4).T, strict=True)
    return found


def _wrap(angles: np.ndarray) -> np.ndarray:
    """To (-pi, pi]."""
    return np.pi - (np.pi - angles) % (2 * np.pi)
