"""A loss that stands out has a high score; a falling loss with its noise has none."""

import random

import pytest

from training.spikes import HIGH, Spikes


def falling(seed, n=400):
    generator = random.Random(seed)
    return [2 + 9 / (1 + 0.05 * step) + generator.gauss(0, 0.03) for step in range(n)]


@pytest.mark.parametrize("seed", range(10))
def test_only_a_spike_is_one(seed):
    losses = falling(seed)
    losses[300] += 0.6
    spikes = Spikes()
    scores = [spikes.z_score(loss) for loss in losses]
    assert scores[:20] == [None] * 20
    assert [i for i, z in enumerate(scores) if z is not None and z >= HIGH] == [300]


def test_the_unit_is_a_standard_deviation():
    spikes = Spikes([-1.0, 1.0] * 25)
    assert spikes.z_score(14.826) == pytest.approx(10)


def test_losses_that_are_all_the_same_have_no_score():
    assert Spikes([1.0] * 50).z_score(2.0) is None
