"""Templates of every stroke that can occur in a Pathfinder image.

A stroke starts at a pixel and leaves it at an angle. Angles are in radians and increase from the
column axis towards the row axis (downwards). The angle of a contour's first stroke is a whole
number of degrees. Every later stroke starts at one of a few pixels on a circle and points to its
centre. The strokes of all images are therefore shifted copies of a few hundred templates.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from PIL import Image, ImageDraw

from data.pathfinder.parameters import Pathfinder, Scale

ANTIALIAS = 2  # strokes are drawn at this multiple of their size, then shrunk

N_SEEDS = 360
"""Number of templates of first strokes, at -180, -179, ..., 179 degrees; the first in a bank."""

SEED_ANGLES = np.arange(-180, 180) * np.pi / 180  # angles of first strokes, in radians

_MARKER_HALO = 4  # pixels around a marker's disk to which shrinking may spread


@dataclass(frozen=True, eq=False)
class TemplateBank:
    """All n templates for one margin; R is the radius of a patch.

    Template t below N_SEEDS is the first stroke of a contour, at t - 180 degrees.
    Template N_SEEDS + i starts at offset `ring[i]` from a point and points to it.
    """

    margin: int
    """Minimum distance between strokes in pixels."""
    lines: np.ndarray
    """(n, 2R + 1, 2R + 1) uint8, the stroke, with the starting pixel at its centre."""
    masks: np.ndarray
    """(n, 2R + 1, 2R + 1) uint8, the stroke and the margin around it, which exclude others."""
    angles: np.ndarray
    """(n,) float64, direction in which the stroke leaves its starting pixel, -pi to 2 pi."""
    ring: np.ndarray
    """(n - N_SEEDS, 2) int64, offsets (y, x) of the pixels where a contour can continue."""
    solid: tuple[np.ndarray, ...]
    """N_SEEDS arrays (k, 2) int64, offsets (y, x) that must be free for a contour to start.

    These are the pixels where the mask is full. As in the reference's code, they are shifted one
    pixel down and right, and limited to stroke_length + margin.
    """


def banks_of(parameters: Pathfinder) -> tuple[TemplateBank, ...]:
    """Template bank of each margin; treat the arrays as constants.

    Display lists number the templates through all banks: the second bank continues the numbers of
    the first.
    """
    return _banks(parameters.scale)


@lru_cache(maxsize=16)
def _banks(scale: Scale) -> tuple[TemplateBank, ...]:
    return tuple(_draw_bank(scale, margin) for margin in scale.margins)


def marker_patch(parameters: Pathfinder) -> np.ndarray:
    """Patch of a marker, uint8, square with odd side; its centre is the marked pixel."""
    radius = parameters.scale.marker_radius
    side = 2 * (math.ceil(radius) + _MARKER_HALO) + 1
    disk = _disk(np.arange(ANTIALIAS * side) - ANTIALIAS * (side // 2), ANTIALIAS * radius)
    return _shrink(np.where(disk, np.uint8(255), np.uint8(0)), side)


def opposite(angles: np.ndarray) -> np.ndarray:
    """Opposite directions, (n,) radians between -pi and pi, as in the reference.

    The choice of pi or -pi can move the end of a stroke by a pixel: both sines should be 0 but
    differ in sign, and ends are rounded up.
    """
    return np.where(angles < 0, angles + math.pi, angles - math.pi)


def disk_offsets(radius: float) -> np.ndarray:
    """Offsets (y, x) of the pixels within `radius`, nearest first, (k, 2) int64."""
    reach = math.floor(radius)
    grid = np.mgrid[-reach : reach + 1, -reach : reach + 1].reshape(2, -1).T
    distance = (grid**2).sum(axis=1)
    order = np.argsort(distance, kind="stable")
    return grid[order][distance[order] <= radius**2]


def ring_offsets(radius: int) -> np.ndarray:
    """Pixels (y, x) of a circle, sampled once per pixel of arc length, (k, 2) int64."""
    angles = [step / radius for step in range(math.ceil(2 * math.pi * radius))]
    points = {
        tuple(math.floor(round(radius * axis(angle), 9)) for axis in (math.sin, math.cos))
        for angle in angles
    }
    return np.array(sorted(points), dtype=np.int64)


def _draw_bank(scale: Scale, margin: int) -> TemplateBank:
    reach = scale.stroke_length + margin
    ring = ring_offsets(reach)
    outwards = np.array([math.atan2(y, x) for y, x in ring.tolist()])
    angles = np.concatenate([SEED_ANGLES, opposite(outwards)])
    patches = [_draw_stroke(angle, scale, margin) for angle in angles.tolist()]
    lines, masks = (np.stack(patch) for patch in zip(*patches, strict=True))
    return TemplateBank(
        margin=margin,
        lines=lines,
        masks=masks,
        angles=angles,
        ring=ring,
        solid=tuple(_solid_offsets(mask, reach) for mask in masks[:N_SEEDS]),
    )


def _draw_stroke(angle: float, scale: Scale, margin: int) -> tuple[np.ndarray, np.ndarray]:
    from scipy.ndimage import grey_dilation

    radius = scale.stroke_length + math.ceil(scale.thickness) + margin
    centre, length = radius * ANTIALIAS, scale.stroke_length * ANTIALIAS
    # the end is rounded up on both axes, as everywhere in the reference
    end_y = math.ceil(centre + length * math.sin(angle))
    end_x = math.ceil(centre + length * math.cos(angle))
    canvas = Image.new("L", (2 * centre + 1, 2 * centre + 1))
    width = round(scale.thickness * ANTIALIAS)
    ImageDraw.Draw(canvas).line([(centre, centre), (end_x, end_y)], fill=255, width=width)
    line = np.asarray(canvas)
    disk = _disk(np.arange(-margin * ANTIALIAS, margin * ANTIALIAS + 1), margin * ANTIALIAS)
    mask = grey_dilation(line, footprint=disk, mode="constant")
    return _shrink(line, 2 * radius + 1), _shrink(mask, 2 * radius + 1)


def _disk(offsets: np.ndarray, radius: float) -> np.ndarray:
    """Mask of a disk, (n, n) bool, for pixels at (n,) offsets along both axes."""
    return offsets[:, None] ** 2 + offsets**2 <= radius**2


def _shrink(image: np.ndarray, side: int) -> np.ndarray:
    """Resize with Lanczos on 8 bits; near edges, the background may rise by a few levels."""
    return np.asarray(Image.fromarray(image).resize((side, side), Image.Resampling.LANCZOS))


def _solid_offsets(mask: np.ndarray, reach: int) -> np.ndarray:
    offsets = np.argwhere(mask == 255) - len(mask) // 2 + 1
    return offsets[(np.abs(offsets) <= reach).all(axis=1)]
