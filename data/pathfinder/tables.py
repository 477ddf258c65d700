"""Lookup tables of the generator, for its tests of where strokes fit.

A canvas is the image's mask with PAD pixels around it, as a flat uint8 array with rows of `stride`
pixels. Offsets into it are single integers, so that testing many pixels takes one loop.
"""

import math
from functools import lru_cache

import numpy as np

from data.pathfinder.parameters import Pathfinder
from data.pathfinder.templates import (
    N_SEEDS,
    SEED_ANGLES,
    TemplateBank,
    banks_of,
    disk_offsets,
    opposite,
)

PAD = 10  # radius of the largest template

_SIDE = 2 * PAD + 1
_MAX_RING = 49
_MAX_TURNS = 20
_MAX_DISK = 29
_MAX_CORE = 80
_MAX_SOLID = 45
_N_ALL = N_SEEDS + _MAX_RING

# From the C library: the last digit of NumPy's own versions depends on the processor.
_sin, _cos = np.vectorize(math.sin), np.vectorize(math.cos)

_FULL = 255
_MAX_SUM = 459  # the sum of two 8-bit masks must stay below 1.8, 459 / 255

# All sizes share one dtype, so that the generator is compiled once. A direction is the index of a
# seed angle, or N_SEEDS + the index of a ring pixel. Lists are padded with zeros.
TABLES_DTYPE = np.dtype(
    [
        ("size", "i8"),
        ("stride", "i8"),
        ("border", "i8"),
        ("contour_length", "i8"),
        ("n_distractors", "i8"),
        ("distractor_length", "i8"),
        ("margin", "i8"),
        ("first_template", "i8"),  # index in display lists of this margin's first template
        ("stroke_length", "f8"),
        ("seed_distance", "f8"),
        ("sin", "f8", (_N_ALL,)),  # of each direction
        ("cos", "f8", (_N_ALL,)),
        ("back_sin", "f8", (N_SEEDS,)),  # of the opposite directions
        ("back_cos", "f8", (N_SEEDS,)),
        # First and last row, then first and last column, where the first contour may start at an
        # angle. A last below the first means nowhere.
        ("first_region", "i8", (N_SEEDS, 4)),
        ("startable", "u1", (N_SEEDS,)),  # see _is_startable
        ("n_solid", "i8", (N_SEEDS,)),
        ("solid", "i4", (N_SEEDS, _MAX_SOLID)),  # canvas offsets that must be free at the start
        ("ring", "i8", (_MAX_RING, 2)),  # pixels (y, x) around a point where a contour can continue
        ("n_turns", "i8", (_N_ALL,)),
        ("turn", "i8", (_N_ALL, _MAX_TURNS)),  # ring pixels after each direction, likely ones first
        ("turn_weight", "f8", (_N_ALL, _MAX_TURNS)),
        ("turn_sum", "f8", (_N_ALL, _MAX_TURNS)),  # inclusive cumulative sum of the weights
        ("n_disk", "i8"),
        ("disk", "i4", (_MAX_DISK,)),  # canvas offsets of the pixels within the margin
        ("n_core", "i8", (_N_ALL,)),
        ("core", "i4", (_N_ALL, _MAX_CORE)),  # canvas offsets where a template's mask can collide
        ("core_limit", "u1", (_N_ALL, _MAX_CORE)),  # smallest mask value that collides there
        ("reach", "i8"),  # radius of a mask
        ("masks", "u1", (_N_ALL, _SIDE, _SIDE)),  # first 2 * reach + 1 rows and columns are used
    ],
    align=True,
)


@lru_cache(maxsize=16)
def build_tables(parameters: Pathfinder) -> np.ndarray:
    """Build the tables of each margin in order, (n_margins,) of TABLES_DTYPE; treat as constant."""
    banks = banks_of(parameters)
    tables = np.zeros(len(banks), TABLES_DTYPE)
    first_template = 0
    for t, bank in zip(tables, banks, strict=True):
        t["first_template"] = first_template
        _fill(t, parameters, bank)
        first_template += len(bank.angles)
    return tables


def _fill(t: np.void, parameters: Pathfinder, bank: TemplateBank) -> None:
    for name in ("size", "contour_length", "n_distractors", "distractor_length"):
        t[name] = getattr(parameters, name)
    for name in ("border", "stroke_length", "seed_distance"):
        t[name] = getattr(parameters.scale, name)
    t["stride"] = stride = parameters.size + 2 * PAD
    t["margin"] = bank.margin
    t["ring"][: len(bank.ring)] = bank.ring
    ring_angles = np.array([math.atan2(y, x) for y, x in bank.ring.tolist()])
    directions = np.concatenate([SEED_ANGLES, ring_angles])
    t["sin"][: len(directions)] = _sin(directions)
    t["cos"][: len(directions)] = _cos(directions)
    t["back_sin"] = _sin(opposite(SEED_ANGLES))
    t["back_cos"] = _cos(opposite(SEED_ANGLES))
    for angle, solid in enumerate(bank.solid):
        t["startable"][angle] = _is_startable(solid)
        t["first_region"][angle] = _first_region(solid, parameters)
        t["n_solid"][angle] = len(solid)
        t["solid"][angle, : len(solid)] = _flat(solid, stride)
    for direction, angle in enumerate(directions.tolist()):
        turn, weight = _turns(angle, ring_angles, parameters.scale.continuity)
        t["n_turns"][direction] = len(turn)
        t["turn"][direction, : len(turn)] = turn
        t["turn_weight"][direction, : len(turn)] = weight
        t["turn_sum"][direction, : len(turn)] = np.cumsum(weight)
    disk = disk_offsets(bank.margin)
    t["n_disk"] = len(disk)
    t["disk"][: len(disk)] = _flat(disk, stride)
    t["reach"] = bank.masks.shape[1] // 2
    for template, mask in enumerate(bank.masks):
        core, limit = _core(mask, stride)
        t["n_core"][template] = len(core)
        t["core"][template, : len(core)] = core
        t["core_limit"][template, : len(core)] = limit
        t["masks"][template, : mask.shape[0], : mask.shape[1]] = mask


def _is_startable(solid: np.ndarray) -> bool:
    """Whether the reference can start a contour at this angle anywhere at all.

    The reference looks for room with a dilation whose structuring element is `solid`. If no pixel
    of that element falls into the image, OpenCV's dilation returns its lowest number. The reference
    then finds no room in the whole image. This happens in a corner of the image unless the element
    reaches into all four quadrants. At size 32, only 30 of 360 angles remain.
    """
    quadrants = [(1, 1), (1, -1), (-1, 1), (-1, -1)]
    return all((solid * np.array(signs) >= 0).all(axis=1).any() for signs in quadrants)


def _first_region(solid: np.ndarray, parameters: Pathfinder) -> list[int]:
    """Region where the first contour may start: all of `solid` stays clear of the edge.

    `solid` is smaller than the border, so it cannot reach across it.
    """
    if not len(solid):
        return [0, -1, 0, -1]
    border = max(parameters.scale.border, 2 * parameters.scale.seed_distance)
    first = border - solid.min(axis=0)
    last = parameters.size - 1 - border - solid.max(axis=0)
    return [int(first[0]), int(last[0]), int(first[1]), int(last[1])]


def _turns(
    angle: float, ring_angles: np.ndarray, continuity: float
) -> tuple[np.ndarray, np.ndarray]:
    """Ring pixels with nonzero weight, heaviest first, and their weights."""
    turn = np.abs((ring_angles - angle + math.pi) % (2 * math.pi) - math.pi)
    bent = np.minimum(continuity * turn, math.pi / 2)
    weight = np.where(bent < math.pi / 2, _cos(bent) ** 2, 0.0)
    order = np.argsort(-weight, kind="stable")
    order = order[weight[order] > 0]
    return order, weight[order]


def _core(mask: np.ndarray, stride: int) -> tuple[np.ndarray, np.ndarray]:
    """Canvas offsets where other masks can collide, strongest first, and the smallest values."""
    strong = mask >= _MAX_SUM - _FULL
    order = np.argsort(mask[strong], kind="stable")[::-1]
    offsets = (np.argwhere(strong) - mask.shape[0] // 2)[order]
    return _flat(offsets, stride), _MAX_SUM - mask[strong][order].astype(np.int64)


def _flat(offsets: np.ndarray, stride: int) -> np.ndarray:
    return offsets[:, 0] * stride + offsets[:, 1]
