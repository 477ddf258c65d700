"""Geometry at the two markers of Pathfinder images, computed from display lists."""

import numpy as np

from data.pathfinder.parameters import Pathfinder, check_display_lists
from data.pathfinder.templates import banks_of


def endpoint_geometry(
    display_lists: np.ndarray, parameters: Pathfinder
) -> tuple[np.ndarray, np.ndarray]:
    """Positions of the markers in (N,) display lists, and directions of their contours.

    Returns:
        positions (N, 2, 2) int64, the pixels (y, x) under the markers;
        directions (N, 2) float64, the angle in (-pi, pi] at which the contour leaves each marker,
        from the column axis towards the row axis (downwards).
        The marker on a contour's origin end comes first, then the one on a terminal end.

    Raises:
        ValueError: The lists are from images with other parameters.
    """
    check_display_lists(display_lists, parameters)
    length = parameters.contour_length
    strokes, markers = display_lists["strokes"], display_lists["markers"]
    # The two origins differ, but two terminal ends may share a pixel: the label then decides.
    first = strokes[:, 0]
    on_first = (first["y"] == markers[:, 0, 0]) & (first["x"] == markers[:, 0, 1])
    origin = np.where(on_first, 0, 1)
    terminal = np.where(display_lists["label"] == 1, origin, 1 - origin)
    slots = np.stack([origin * length, terminal * length + length - 1], axis=1)
    templates = np.take_along_axis(strokes["template"], slots, axis=1)
    angles = np.concatenate([bank.angles for bank in banks_of(parameters)])[templates]
    return markers.astype(np.int64), np.arctan2(np.sin(angles), np.cos(angles))
