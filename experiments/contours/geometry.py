"""What a viewer sees at the two markers of Pathfinder images, and pairs that look alike there.

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

_POSITIONS = ("row_a", "column_a", "row_b", "column_b")
_TANGENTS = ("row_direction_a", "column_direction_a", "row_direction_b", "column_direction_b")

_MIDPOINT_WEIGHT = 0.25  # where in the image: matters less than how the ends lie to each other
_DIRECTION_WEIGHT = 2.0  # in strokes: what a radian is worth
_ROWS = 1000  # of images of label 1 that are compared at a time

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
    found = endpoint_geometry(opened.display_lists, parameters)
    return Endpoints(
        labels=np.array(opened.labels),
        positions=found.positions - (parameters.size - 1) / 2,
        directions=np.stack([np.sin(found.directions), np.cos(found.directions)], axis=-1),
        period=parameters.stroke_length + 2 * float(np.mean(parameters.margins)),
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


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How far the two images of a pair may be apart."""

    geometry: float = 1.5
    """Of `describe`: in strokes, from the start of one to that of the next."""
    log_odds: float = 0.1
    """Of the classifiers of geometry."""

    def __post_init__(self) -> None:
        for name in ("geometry", "log_odds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0")


def describe(endpoints: Endpoints) -> np.ndarray:
    """(N, 8) float32: vectors whose distance says how differently ends lie and point.

    From marker to marker, the point between them, and both directions, each as row and column.
    """
    positions, directions = endpoints.positions / endpoints.period, endpoints.directions
    parts = (
        positions[:, 1] - positions[:, 0],
        _MIDPOINT_WEIGHT * positions.mean(axis=1),
        _DIRECTION_WEIGHT * directions[:, 0],
        _DIRECTION_WEIGHT * directions[:, 1],
    )
    return np.concatenate(parts, axis=1).astype(np.float32)


def match(endpoints: Endpoints, log_odds: np.ndarray, tolerance: Tolerance) -> np.ndarray:
    """Pair images of label 1 with images of label 0, nearest first, each used once at most.

    Who sees the ends alone cannot tell which of the two has its markers on one contour. Alike means
    two things, as in Rosenbaum and Rubin 1985, "Constructing a control group using multivariate
    matched sampling methods that incorporate the propensity score" (The American Statistician 39):
    the ends lie and point nearly the same, and classifiers of that geometry give nearly the same
    odds. The first alone is not enough where odds change fast, the second where a classifier missed
    something. An image is as near as the nearest of what looks the same: its markers in either
    order, rows and columns swapped or not.

    `log_odds` are (n_classifiers, N), what classifiers of endpoint geometry say of N images.

    Returns:
        (n_pairs, 2) int64, numbers of the images: label 1, then label 0.
    """
    same, different = np.flatnonzero(endpoints.labels == 1), np.flatnonzero(endpoints.labels == 0)
    alike = [
        describe(one)[same]
        for view in (endpoints, endpoints.swapped())
        for one in (view, view.transposed())
    ]
    others = describe(endpoints)[different]
    squares = (others**2).sum(axis=1)
    candidates: list[np.ndarray] = [np.empty((3, 0))]
    for first in range(0, len(same), _ROWS):
        rows = slice(first, first + _ROWS)
        distance = np.min(
            [(v[rows] ** 2).sum(axis=1)[:, None] + squares - 2 * v[rows] @ others.T for v in alike],
            axis=0,
        )
        near = distance < tolerance.geometry**2
        for said in log_odds:
            near &= np.abs(said[same[rows]][:, None] - said[different]) < tolerance.log_odds
        i, j = np.nonzero(near)
        candidates.append(np.stack([same[rows][i], different[j], distance[i, j]]))
    one, other, distance = np.concatenate(candidates, axis=1)
    used = np.zeros(len(endpoints), bool)
    pairs = []
    for k in np.argsort(distance, kind="stable"):
        a, b = int(one[k]), int(other[k])
        if not (used[a] or used[b]):
            used[a] = used[b] = True
            pairs.append((a, b))
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)
