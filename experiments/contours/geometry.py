"""Geometry at the two markers of Pathfinder images.

The order of the markers carries no information. Swapping rows and columns does not change an
image's distribution, but rotating and mirroring do: the generator rounds coordinates up, so
contours drift down and to the right, and a classifier can use that.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from data.lra.store import DisplayLists, open_split
from data.pathfinder.geometry import endpoint_geometry
from data.pathfinder.parameters import Pathfinder

PREDICTIONS = Path("out/pathfinder_baselines")
"""Folder where baselines.py saves its predictions on each image, for tracing.py."""

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
"""Features available to each baseline, by their names in `features`. "One direction" is that of one
marker, without knowing whether a contour begins or ends there."""


@dataclass(frozen=True)
class Endpoints:
    """Markers of N images, in the order of the generator: origin end first."""

    labels: np.ndarray
    """(N,) uint8, 1 if both markers are on one contour."""
    positions: np.ndarray
    """(N, 2, 2) float64, (y, x) in pixels from the image centre."""
    directions: np.ndarray
    """(N, 2, 2) float64, unit vectors (y, x) of the contour leaving each marker."""
    period: float
    """Distance between the starts of consecutive strokes, pixels, mean over margins."""

    def __len__(self) -> int:
        return len(self.labels)

    def swapped(self) -> "Endpoints":
        """Endpoints with the order of the markers swapped."""
        return replace(self, positions=self.positions[:, ::-1], directions=self.directions[:, ::-1])

    def transposed(self, images: ArrayLike = True) -> "Endpoints":
        """Endpoints with rows and columns swapped, in all images or in `images`, (N,) bool."""
        swap, vectors = np.reshape(images, (-1, 1, 1)), (self.positions, self.directions)
        positions, directions = (np.where(swap, x[..., ::-1], x) for x in vectors)
        return replace(self, positions=positions, directions=directions)


def open_contours(folder: Path, split: str) -> tuple[DisplayLists, Pathfinder]:
    """Open a split of a prepared task of generated Pathfinder images, with their parameters.

    Raises:
        ValueError, FileNotFoundError: the folder has no such task.
    """
    opened = open_split(folder, split)
    if not isinstance(opened, DisplayLists):
        raise ValueError(
            f"{folder} has {opened.manifest.kind}, which have no contour endpoints. Prepare the "
            "task without --source, so that its images are generated"
        )
    return opened, Pathfinder(**opened.manifest.source["parameters"])


def read_endpoints(folder: Path, split: str) -> Endpoints:
    """Read the markers of a split of a prepared task. Raises like `open_contours`."""
    opened, parameters = open_contours(folder, split)
    positions, directions = endpoint_geometry(opened.display_lists, parameters)
    return Endpoints(
        labels=np.array(opened.labels),
        positions=positions - (parameters.size - 1) / 2,
        directions=np.stack([np.sin(directions), np.cos(directions)], axis=-1),
        period=parameters.scale.stroke_length + 2 * float(np.mean(parameters.scale.margins)),
    )


def views(endpoints: Endpoints) -> Iterator[Endpoints]:
    """Yield the images seen from either marker, transposed if that marker is below the diagonal."""
    for view in (endpoints, endpoints.swapped()):
        first = view.positions[:, 0]
        yield view.transposed(first[:, 0] > first[:, 1])


def features(endpoints: Endpoints) -> dict[str, np.ndarray]:
    """Compute the features by name, (N,) float64 each. a is the first marker, b the second.

    Lengths are in pixels. A turn is the angle in (-pi, pi] from the line between the markers to the
    contour. Mirroring an image flips the sign of both turns, and swapping the markers swaps them.
    Folded turns, |a| <= b, are invariant to both.
    """
    positions, directions = endpoints.positions, endpoints.directions
    line = positions[:, 1] - positions[:, 0]
    line_angle = np.arctan2(line[:, 0], line[:, 1])
    angles = np.arctan2(directions[..., 0], directions[..., 1])
    turn_a, turn_b = _wrap(angles[:, 0] - line_angle), _wrap(angles[:, 1] - line_angle - np.pi)
    a_is_less = np.abs(turn_a) <= np.abs(turn_b)
    small, large = np.where(a_is_less, turn_a, turn_b), np.where(a_is_less, turn_b, turn_a)
    result = {
        "distance": np.hypot(line[:, 0], line[:, 1]),
        "row_difference": line[:, 0],
        "column_difference": line[:, 1],
        "turn_a": turn_a,
        "turn_b": turn_b,
        "size_of_turn_a": np.abs(turn_a),
        "folded_turn_a": np.where(large < 0, -small, small),
        "folded_turn_b": np.abs(large),
    }
    for names, values in ((_POSITIONS, positions), (_TANGENTS, directions)):
        result |= zip(names, values.reshape(-1, 4).T, strict=True)
    return result


def _wrap(angles: np.ndarray) -> np.ndarray:
    """Wrap angles to (-pi, pi]."""
    return np.pi - (np.pi - angles) % (2 * np.pi)
