import numpy as np
import pytest

from data.pathfinder import contours
from data.pathfinder.parameters import Pathfinder
from data.pathfinder.tables import PAD, build_tables
from data.pathfinder.templates import banks_of, disk_offsets

N_DRAWS = 20_000


@pytest.mark.parametrize("lowest", [0, 100, 230])
def test_turns_are_chosen_by_weight(lowest):
    """Chi-square against weights from all of the mask; with a full mask most draws are refused."""
    parameters = Pathfinder(64)
    tables, bank = build_tables(parameters)[0], banks_of(parameters)[0]
    rng = np.random.default_rng(0)
    mask = np.where(rng.random((64, 64)) < 0.3, rng.integers(lowest, 250, (64, 64)), lowest)
    canvas = np.pad(mask, PAD).astype(np.uint8).reshape(-1)
    degree = 30
    taken = np.array(
        [max(mask[30 + y + dy, 30 + x + dx] for dy, dx in disk_offsets(1)) for y, x in bank.ring]
    )
    turn = np.arctan2(bank.ring[:, 0], bank.ring[:, 1]) - np.radians(degree)
    turn = np.abs((turn + np.pi) % (2 * np.pi) - np.pi)
    weights = np.cos(np.minimum(1.8 * turn, np.pi / 2)) ** 2 * (1 - taken / 255)
    expected = N_DRAWS * weights / weights.sum()
    state, scratch = np.array([1, 3], np.uint64), np.empty(tables["turn"].shape[1])
    arguments = (canvas, tables, state, 30, 30, degree + 180, scratch)
    chosen = [contours._choose(*arguments) for _ in range(N_DRAWS)]
    counts = np.bincount(chosen, minlength=len(expected))
    possible = expected > 1
    assert counts[~possible].sum() < 10
    statistic = ((counts - expected) ** 2 / expected)[possible].sum()
    degrees = possible.sum() - 1
    assert abs(statistic - degrees) < 4 * np.sqrt(2 * degrees)


def test_no_turn_where_all_is_taken():
    tables = build_tables(Pathfinder(64))[0]
    canvas = np.full(tables["stride"] ** 2, 255, np.uint8)
    state, scratch = np.array([1, 3], np.uint64), np.empty(tables["turn"].shape[1])
    assert contours._choose(canvas, tables, state, 30, 30, 0, scratch) == -1
    # a contour that points out of the image cannot continue
    canvas[:] = 0
    assert contours._choose(canvas, tables, state, 90, 30, 270, scratch) == -1
