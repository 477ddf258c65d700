"""Intervals of accuracies against those of tables."""

import pytest

from scripts.wilson import wilson


@pytest.mark.parametrize(
    ("share", "n", "low", "high"),
    [(0.5, 100, 0.4038, 0.5962), (0.0, 10, 0.0, 0.2775), (1.0, 10, 0.7225, 1.0),
     (0.37, 2000, 0.3491, 0.3914), (0.81, 263, 0.7583, 0.8529)],
)  # fmt: skip
def test_wilson_interval(share, n, low, high):
    assert wilson(share, n) == pytest.approx((low, high), abs=1e-4)
