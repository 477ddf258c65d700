"""Positions of pixels, and resizing learned ones to a larger image."""

import math

import pytest
import torch

from kernels.fused.reference.rotary import apply_rotary
from model.positions import (
    axial_rotary_tables,
    duplicate_gridwise,
    row_and_column_waves,
    sinusoids,
)


def scores(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Compute scores (T, T) of one query and one key vector, rotated to all positions."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 16, generator=generator, dtype=torch.float64)
    cos, sin = axial_rotary_tables(rows, columns, 16, 4.0, 100.0)
    q, k = (apply_rotary(x.expand(1, len(rows), 1, 16), cos, sin)[0, :, 0] for x in (q, k))
    return q @ k.T


def test_axial_scores_depend_only_on_both_differences() -> None:
    rows, columns = torch.tensor([0, 5, 2, 7]), torch.tensor([1, 9, 4, 12])
    expected = scores(rows, columns)
    torch.testing.assert_close(scores(rows + 11, columns + 40), expected, atol=1e-5, rtol=0)
    # (0, 1) to (5, 9) is as far as (2, 4) to (7, 12)
    torch.testing.assert_close(expected[0, 1], expected[2, 3], atol=1e-5, rtol=0)
    assert (scores(columns, rows) - expected).abs().max() > 0.01


def test_axial_wavelengths() -> None:
    period = torch.tensor([0, 4, 100])
    cos, sin = axial_rotary_tables(period, torch.zeros(3, dtype=torch.int64), 16, 4.0, 100.0)
    assert cos.shape == sin.shape == (3, 8)
    torch.testing.assert_close(cos[1, 0], torch.tensor(1.0))  # the fastest pair has period 4
    torch.testing.assert_close(cos[2, 3], torch.tensor(1.0))  # the slowest has period 100
    torch.testing.assert_close(sin[1, 3], torch.tensor(math.sin(2 * math.pi * 4 / 100)))
    assert torch.equal(cos[:, 4:], torch.ones(3, 4))  # columns' pairs


def test_sinusoids_match_the_paper() -> None:
    table = sinusoids(torch.arange(5), 8)
    for position in range(5):
        for i in range(4):
            angle = position / 10_000 ** (2 * i / 8)
            assert table[position, i] == pytest.approx(math.sin(angle), abs=1e-6)
            assert table[position, 4 + i] == pytest.approx(math.cos(angle), abs=1e-6)


def test_waves_depend_on_the_relative_place_in_the_image() -> None:
    small = row_and_column_waves(torch.tensor([1]), torch.tensor([3]), 4, 3)
    large = row_and_column_waves(torch.tensor([4, 7]), torch.tensor([12, 15]), 16, 3)
    assert small.shape == (1, 12)
    # a pixel and the 4 x 4 pixels that replace it have the same centre
    where = torch.tensor([1.5 / 4, 3.5 / 4])
    angles = (where[:, None] * torch.tensor([1, 2, 4]) * math.pi).flatten()
    torch.testing.assert_close(small[0], torch.cat((angles.sin(), angles.cos())))
    first = large[:, 0].asin().mean() / math.pi * 16  # rows 4.5 and 7.5
    assert first == pytest.approx(6.0, abs=1e-4)


def test_duplicated_positions_cover_their_squares() -> None:
    table = torch.randn(9, 2)
    grown = duplicate_gridwise(table, 6).view(6, 6, 2)
    for row in range(6):
        for column in range(6):
            assert torch.equal(grown[row, column], table[row // 2 * 3 + column // 2])


@pytest.mark.parametrize(("n", "width"), [(8, 4), (9, 4)])
def test_only_grids_are_duplicated(n: int, width: int) -> None:
    with pytest.raises(ValueError, match=rf"{n} learned positions .* {width} x {width}"):
        duplicate_gridwise(torch.zeros(n, 2), width)
