import math

import numpy as np
import pytest
from PIL import Image

from data.pathfinder.parameters import Pathfinder
from data.pathfinder.tables import build_tables
from data.pathfinder.templates import (
    N_SEEDS,
    banks_of,
    disk_offsets,
    marker_patch,
    ring_offsets,
)

BANKS = [
    # size, margin, pixels of the ring, angles at which a contour can start
    (32, 1, 18, 30),
    (64, 1, 38, 95),
    (128, 2, 41, 354),
    (128, 3, 49, 360),
    (256, 3, 49, 360),
]


def _bank(size, margin):
    return next(bank for bank in banks_of(Pathfinder(size)) if bank.margin == margin)


@pytest.mark.parametrize(("size", "margin", "n_ring", "n_startable"), BANKS)
def test_counts(size, margin, n_ring, n_startable):
    bank = _bank(size, margin)
    assert bank.ring.shape == (n_ring, 2)
    assert len(bank.lines) == len(bank.masks) == len(bank.angles) == N_SEEDS + n_ring
    tables = build_tables(Pathfinder(size))
    assert tables["startable"][tables["margin"] == margin].sum() == n_startable


@pytest.mark.parametrize(("size", "margin"), [bank[:2] for bank in BANKS])
def test_strokes_lie_in_their_direction(size, margin):
    """A stroke's centre of mass is half its length from the start, at its angle."""
    bank = _bank(size, margin)
    length = Pathfinder(size).scale.stroke_length
    reach = bank.lines.shape[1] // 2
    steps = np.arange(-reach, reach + 1)
    weight = bank.lines.astype(float)
    weight /= weight.sum(axis=(1, 2), keepdims=True)
    centre = np.stack(
        [(weight * steps[:, None]).sum(axis=(1, 2)), (weight * steps).sum(axis=(1, 2))], axis=1
    )
    middle = np.stack([np.sin(bank.angles), np.cos(bank.angles)], axis=1) * length / 2
    # ends are rounded up to whole pixels of the doubled scale, and so are the middles by a half
    assert np.abs(centre - middle).max() < 0.8
    assert np.abs((centre - middle).mean(axis=0)).max() < 0.4


@pytest.mark.parametrize(("size", "margin"), [bank[:2] for bank in BANKS])
def test_masks_cover_lines_and_margin(size, margin):
    bank = _bank(size, margin)
    assert (bank.masks.max(axis=(1, 2)) == 255).all()
    assert (bank.masks[bank.lines > 128] > 200).all()
    area = (bank.masks > 127).sum(axis=(1, 2)).mean()
    parameters = Pathfinder(size)
    width = parameters.scale.thickness + 2 * margin
    expected = parameters.scale.stroke_length * width + math.pi * width**2 / 4
    assert area == pytest.approx(expected, rel=0.25)


def test_ring_strokes_start_where_a_contour_continues_and_point_back():
    bank = _bank(128, 3)
    back = bank.angles[N_SEEDS:]
    distance = np.hypot(*bank.ring.T)
    assert np.allclose(bank.ring[:, 0], -distance * np.sin(back))
    assert np.allclose(bank.ring[:, 1], -distance * np.cos(back))
    assert (np.abs(distance - 8) < 1.5).all()


def test_disks_and_rings():
    assert disk_offsets(0).tolist() == [[0, 0]]
    assert sorted(disk_offsets(1).tolist()) == [[-1, 0], [0, -1], [0, 0], [0, 1], [1, 0]]
    assert len(disk_offsets(3)) == 29
    # rounded down: one pixel further up and left
    assert ring_offsets(3).min() == -3
    assert ring_offsets(3).max() == 3


@pytest.mark.parametrize("size", [32, 64, 128, 256])
def test_marker_is_the_disk_drawn_in_a_whole_image(size):
    parameters = Pathfinder(size)
    y, x = size // 2 - 3, size // 2 + 5
    rows, columns = np.mgrid[: 2 * size, : 2 * size]
    disk = (rows - 2 * y) ** 2 + (columns - 2 * x) ** 2 <= (2 * parameters.scale.marker_radius) ** 2
    large = Image.fromarray(np.where(disk, 255, 0).astype(np.uint8))
    expected = np.asarray(large.resize((size, size), Image.Resampling.LANCZOS))
    patch = marker_patch(parameters)
    reach = len(patch) // 2
    image = np.zeros((size, size), np.uint8)
    image[y - reach : y + reach + 1, x - reach : x + reach + 1] = patch
    assert np.array_equal(image, expected)
    assert patch.max() == 255


@pytest.mark.parametrize("size", [32, 64, 128, 256])
def test_strokes_to_the_left_and_to_the_right_are_level(size):
    """sin(pi) is not quite 0, which moves an end that is rounded up a pixel lower."""
    for bank in banks_of(Pathfinder(size)):
        level = [i for i, (y, _) in enumerate(bank.ring.tolist()) if y == 0]
        rows = [np.count_nonzero(bank.lines[N_SEEDS + i].max(axis=1) > 25) for i in level]
        assert len(rows) >= 2 and len(set(rows)) == 1
