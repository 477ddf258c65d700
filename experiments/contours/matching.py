"""Pairs of Pathfinder images that look alike at their markers, one of each label."""

from dataclasses import dataclass

import numpy as np
from scipy.spatial import KDTree

from experiments.contours.geometry import Endpoints

_MIDPOINT_WEIGHT = 0.25  # where in the image: matters less than how the ends lie to each other
_DIRECTION_WEIGHT = 2.0  # in strokes: what a radian is worth


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
    others = KDTree(describe(endpoints)[different])
    found = []
    for view in (endpoints, endpoints.swapped()):
        for one in (view, view.transposed()):
            alike = KDTree(describe(one)[same])
            found.append(
                alike.sparse_distance_matrix(others, tolerance.geometry, output_type="ndarray")
            )
    near = np.sort(np.concatenate(found), order=["v", "i", "j"])
    one, other = same[near["i"]], different[near["j"]]
    agree = (np.abs(log_odds[:, one] - log_odds[:, other]) < tolerance.log_odds).all(axis=0)
    used = np.zeros(len(endpoints), bool)
    pairs = []
    for a, b in zip(one[agree].tolist(), other[agree].tolist(), strict=True):
        if not (used[a] or used[b]):
            used[a] = used[b] = True
            pairs.append((a, b))
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)
