"""Every stroke that can occur in a Pathfinder image, drawn once.

A stroke starts at a pixel and leaves it at an angle. Angles are in radians and grow from the
column axis towards the row axis (downwards). A contour's first stroke has a whole number of
degrees, and every further one starts at one of a few pixels on a circle and points to its middle,
so the strokes of all images are shifted copies of a few hundred templates.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from PIL import Image, ImageDraw

from data.pathfinder.parameters import Pathfinder, Scale

ANTIALIAS = 2  # strokes are drawn this many times larger and then shrunk

N_SEEDS = 360
"""Templates of first strokes, for -180, -179, ..., 179 degrees; they come first in a bank."""

SEED_ANGLES = np.arange(-180, 180) * np.pi / 180  # of the templates of first strokes, in radians

_MARKER_HALO = 4  # pixels beyond a marker's disk that shrinking may still colour


@dataclass(frozen=True, eq=False)
class TemplateBank:
    """All templates for one margin; n of them, R the radius of a patch.

    Template t below N_SEEDS is the first stroke of a contour that runs at t - 180 degrees.
    Template N_SEEDS + i starts at `ring[i]` pixels from a point and points to it.
    """

    margin: int
    """Pixels that strokes keep from each other."""
    lines: np.ndarray
    """(n, 2R + 1, 2R + 1) uint8, the stroke, to be put with its middle on the starting pixel."""
    masks: np.ndarray
    """(n, 2R + 1, 2R + 1) uint8, the stroke and its margin all around, where others may not be."""
    angles: np.ndarray
    """(n,) float64, the direction in which the stroke leaves its starting pixel, -pi to 2 pi."""
    ring: np.ndarray
    """(n - N_SEEDS, 2) int64, offsets (y, x) of the pixels where a contour can go on."""
    solid: tuple[np.ndarray, ...]
    """N_SEEDS arrays (k, 2) int64, the offsets (y, x) that must be free for a contour to start.

    They are where the mask is full, one pixel down and right of where they should be, and cut at
    stroke_length + margin, as in the reference's code.
    """


def banks_of(parameters: Pathfinder) -> tuple[TemplateBank, ...]:
    """A bank for each margin of an image; treat the arrays as constants.

    Display lists number the templates through all banks: those of the second follow those of the
    first.
    """
    return _banks(parameters.scale)


@lru_cache(maxsize=16)
def _banks(scale: Scale) -> tuple[TemplateBank, ...]:
    return tuple(_draw_bank(scale, margin) for margin in scale.margins)


def marker_patch(parameters: Pathfinder) -> np.ndarray:
    """A marker, to be put with its middle on the pixel it marks: uint8, square, of odd side."""
    radius = parameters.scale.marker_radius
    side = 2 * (math.ceil(radius) + _MARKER_HALO) + 1
    disk = _disk(np.arange(ANTIALIAS * side) - ANTIALIAS * (side // 2), ANTIALIAS * radius)
    return _shrink(np.where(disk, np.uint8(255), np.uint8(0)), side)


def turned_back(angles: np.ndarray) -> np.ndarray:
    """(n,) radians, the opposite directions, between -pi and pi as the reference has them.

    The end of a stroke at pi and at -pi can be a pixel apart: their sines differ in sign, where
    both should be 0, and ends are rounded up.
    """
    return np.where(angles < 0, angles + math.pi, angles - math.pi)


def disk_offsets(radius: float) -> np.ndarray:
    """(k, 2) int64, the offsets (y, x) of the pixels no further than `radius`, nearest first."""
    reach = math.floor(radius)
    grid = np.mgrid[-reach : reach + 1, -reach : reach + 1].reshape(2, -1).T
    distance = (grid**2).sum(axis=1)
    order = np.argsort(distance, kind="stable")
    return grid[order][distance[order] <= radius**2]


def ring_offsets(radius: int) -> np.ndarray:
    """(k, 2) int64, pixels (y, x) of a circle that is sampled once every pixel of its length."""
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
    angles = np.concatenate([SEED_ANGLES, turned_back(outwards)])
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
    middle, length = radius * ANTIALIAS, scale.stroke_length * ANTIALIAS
    # the end is rounded up on both axes, as everywhere in the reference
    end_y = math.ceil(middle + length * math.sin(angle))
    end_x = math.ceil(middle + length * math.cos(angle))
    canvas = Image.new("L", (2 * middle + 1, 2 * middle + 1))
    width = round(scale.thickness * ANTIALIAS)
    ImageDraw.Draw(canvas).line([(middle, middle), (end_x, end_y)], fill=255, width=width)
    line = np.asarray(canvas)
    disk = _disk(np.arange(-margin * ANTIALIAS, margin * ANTIALIAS + 1), margin * ANTIALIAS)
    mask = grey_dilation(line, footprint=disk, mode="constant")
    return _shrink(line, 2 * radius + 1), _shrink(mask, 2 * radius + 1)


def _disk(offsets: np.ndarray, radius: float) -> np.ndarray:
    """(n, n) bool, which pixels at (n,) offsets along both axes are no further than `radius`."""
    return offsets[:, None] ** 2 + offsets**2 <= radius**2


def _shrink(image: np.ndarray, side: int) -> np.ndarray:
    """Resize with Lanczos on 8 bits; background comes out at up to a few levels near edges."""
    return np.asarray(Image.fromarray(image).resize((side, side), Image.Resampling.LANCZOS))


def _solid_offsets(mask: np.ndarray, reach: int) -> np.ndarray:
    offsets = np.argwhere(mask == 255) - len(mask) // 2 + 1
    return offsets[(np.abs(offsets) <= reach).all(axis=1)]
