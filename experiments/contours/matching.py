"""Pairs of Pathfinder images that look alike at their markers, one of each label."""

from dataclasses import dataclass

import numpy as np

from experiments.contours.geometry import Endpoints

_MIDPOINT_WEIGHT = 0.25  # where in the image: matters less than how the ends lie to each other
_DIRECTION_WEIGHT = 2.0  # in strokes: what a radian is worth
_ROWS = 1000  # of images of label 1 that are compared at a time


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """The largest differences between the two images of a pair."""

    geometry: float = 1.5
    """Between vectors of `describe`, in strokes, from the start of one to that of the next."""
    log_odds: float = 0.1
    """Between what classifiers of geometry say."""

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
