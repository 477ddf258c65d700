"""The order of training: every example once an epoch, a function of key and number alone."""

import numpy as np

from data.lra.order import ExampleSampler


def test_an_epoch_visits_every_example_once() -> None:
    sampler = ExampleSampler(37, (5, 0))
    epochs = sampler.examples(np.arange(3 * 37)).reshape(3, 37)
    for epoch in epochs:
        assert sorted(epoch) == list(range(37))
    assert (epochs[0] != epochs[1]).any()


def test_single_samples_are_those_of_any_batch() -> None:
    sampler = ExampleSampler(10, (1,))
    numbers = np.arange(4090, 4110)
    together = sampler.examples(numbers), sampler.changes(numbers)
    for i, number in enumerate(numbers):
        one = np.array([number])
        assert sampler.examples(one)[0] == together[0][i]
        assert sampler.changes(one)[0] == together[1][i]


def test_keys_give_orders_of_their_own() -> None:
    numbers = np.arange(100)
    one, other = ExampleSampler(100, (1, 2)), ExampleSampler(100, (1, 3))
    assert (one.examples(numbers) != other.examples(numbers)).any()
    assert (one.changes(numbers) != other.changes(numbers)).any()


def test_changes_are_even() -> None:
    counts = np.bincount(ExampleSampler(10, (3,)).changes(np.arange(80_000)), minlength=8)
    assert len(counts) == 8
    assert np.abs(counts - 10_000).max() < 500  # five standard errors
