"""Pairs of Pathfinder images that look alike at their markers, one of each label."""

from dataclasses import dataclass

import numpy as np

from experiments.contours.geometry import Endpoints

_MIDPOINT_WEIGHT = 0.25  # the position in the image matters less than the relative position
_DIRECTION_WEIGHT = 2.0  # strokes per radian
_ROWS = 1000  # images of label 1 compared at a time


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Largest differences between the two images of a pair."""

    geometry: float = 1.5
    """Distance between vectors of `describe`, in stroke periods."""
    log_odds: float = 0.1
    """Difference of the geometry classifiers' log-odds."""

    def __post_init__(self) -> None:
        for name in ("geometry", "log_odds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0")


def describe(endpoints: Endpoints) -> np.ndarray:
    """Vectors whose distance measures the difference of endpoint geometry, (N, 8) float32.

    Their parts are the line between the markers, its midpoint, and both directions, each as row
    and column.
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
    """Pair images of label 1 with images of label 0, nearest first, each image at most once.

    The ends alone do not distinguish the two images of a pair. Two criteria must hold, as
    in Rosenbaum and Rubin 1985, "Constructing a control group using multivariate matched sampling
    methods that incorporate the propensity score" (The American Statistician 39): the endpoint
    geometry is nearly equal, and classifiers of that geometry give nearly equal odds. The first
    alone fails where odds change fast, the second where a classifier missed something. The distance
    is the minimum over equivalent images: markers in either order, rows and columns swapped or not.

    Args:
        endpoints: of N images.
        log_odds: of classifiers of endpoint geometry, (n_classifiers, N).
        tolerance: largest differences within a pair.

    Returns:
        (n_pairs, 2) int64, image numbers: label 1, then label 0.
    """
    same, different = np.flatnonzero(endpoints.labels == 1), np.flatnonzero(endpoints.labels == 0)
    equivalents = [
        describe(x)[same]
        for view in (endpoints, endpoints.swapped())
        for x in (view, view.transposed())
    ]
    others = describe(endpoints)[different]
    squares = (others**2).sum(axis=1)
    candidates: list[np.ndarray] = [np.empty((3, 0))]
    for first in range(0, len(same), _ROWS):
        rows = slice(first, first + _ROWS)
        distance = np.min(
            [
                (v[rows] ** 2).sum(axis=1)[:, None] + squares - 2 * v[rows] @ others.T
                for v in equivalents
            ],
            axis=0,
        )
        near = distance < tolerance.geometry**2
        for odds in log_odds:
            near &= np.abs(odds[same[rows]][:, None] - odds[different]) < tolerance.log_odds
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
