from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.sampler import DocumentSampler, Permutation, ShuffledRange, WindowSampler, first_sample

keys = st.lists(st.integers(0, 2**64), min_size=1, max_size=3)


@settings(deadline=None)
@given(n=st.integers(1, 3000), key=keys)
def test_permutation_is_a_bijection(n, key):
    assert sorted(Permutation(n, key)(np.arange(n)).tolist()) == list(range(n))


@settings(deadline=None)
@given(n=st.integers(2**33, 2**62), key=keys, data=st.data())
def test_large_permutation_stays_in_range_and_apart(n, key, data):
    index = np.array(data.draw(st.lists(st.integers(0, n - 1), unique=True, max_size=50)), np.int64)
    out = Permutation(n, key)(index)
    assert len(set(out.tolist())) == len(index)
    assert ((out >= 0) & (out < n)).all()


def test_permutation_takes_any_shape_and_refuses_others():
    permutation = Permutation(100, (1,))
    index = np.arange(24).reshape(2, 3, 4)
    assert (permutation(index).reshape(-1) == permutation(np.arange(24))).all()
    assert permutation(5).shape == ()
    assert permutation([]).shape == (0,)
    with pytest.raises(IndexError, match=r"\[0, 100\)"):
        permutation(100)
    with pytest.raises(ValueError, match="n=0"):
        Permutation(0, (1,))


def test_permutation_is_uniform():
    """Chi-square over 1,000 keys: where each of 10 numbers goes; 81 degrees of freedom."""
    n, n_keys = 10, 1000
    counts = np.zeros((n, n))
    for key in range(n_keys):
        counts[np.arange(n), Permutation(n, (key,))(np.arange(n))] += 1
    expected = n_keys / n
    assert ((counts - expected) ** 2 / expected).sum() < 130  # p is about 0.0005


def test_permutation_never_changes():
    """Fixed values: a checkpoint resumed with newer code must meet the same order."""
    assert Permutation(1000, (1337, 0))(np.arange(5)).tolist() == PINNED


PINNED = [430, 643, 159, 416, 898]

corpora = st.tuples(st.integers(1, 40), st.integers(0, 1000)).map(lambda x: (x[0] + 1 + x[1], x[0]))


@settings(deadline=None)
@given(corpora, st.integers(0, 2**32))
def test_every_window_once_per_epoch(corpus, seed):
    n_tokens, context_length = corpus
    sampler = WindowSampler(n_tokens, context_length, seed)
    n = sampler.windows_per_epoch
    for epoch in range(3):
        starts = np.sort(sampler.position(np.arange(epoch * n, (epoch + 1) * n)))
        assert starts[0] == sampler.epoch_offset(epoch)
        assert 0 <= starts[0] < context_length
        assert (np.diff(starts) == context_length).all()
        assert starts[-1] + context_length + 1 <= n_tokens
        assert n_tokens - n * context_length - 1 < 2 * context_length


@settings(deadline=None, max_examples=40)
@given(corpora, st.integers(0, 2**32), st.integers(0, 10**6), st.integers(1, 40))
def test_position_is_independent_of_batching_and_history(corpus, seed, first, count):
    sampler = WindowSampler(*corpus, seed)
    numbers = np.arange(first, first + count)
    at_once = sampler.position(numbers)
    one_by_one = [int(WindowSampler(*corpus, seed).position(number)) for number in numbers]
    assert at_once.tolist() == one_by_one
    assert (sampler.position(numbers[::-1].reshape(-1, 1))[:, 0] == at_once[::-1]).all()


def test_epochs_and_seeds_differ():
    sampler = WindowSampler(100_000, 10, seed=0)
    n = sampler.windows_per_epoch
    first, second = sampler.position(np.arange(n)), sampler.position(np.arange(n, 2 * n))
    other = WindowSampler(100_000, 10, seed=1).position(np.arange(n))
    assert (first != second).mean() > 0.9
    assert (first != other).mean() > 0.9
    assert len({sampler.epoch_offset(epoch) for epoch in range(100)}) == 10


def test_short_corpus_and_bad_arguments():
    assert WindowSampler(5, 4, 0).position([0, 1, 2]).tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match=r"has 4 tokens.* needs 5"):
        WindowSampler(4, 4, 0)
    with pytest.raises(ValueError, match="context_length=0"):
        WindowSampler(4, 0, 0)
    with pytest.raises(ValueError, match="seed=-1"):
        WindowSampler(9, 4, -1)
    with pytest.raises(IndexError, match="one is -1"):
        WindowSampler(9, 4, 0).position(-1)


@pytest.mark.parametrize(("world_size", "grad_accum_steps"), [(1, 12), (2, 6), (4, 3), (12, 1)])
def test_samples_of_a_step_do_not_depend_on_the_gpus(world_size, grad_accum_steps):
    numbers = [
        first_sample(
            start=7 * 24,
            micro_step=micro_step,
            rank=rank,
            grad_accum_steps=grad_accum_steps,
            world_size=world_size,
            micro_batch_size=2,
        )
        + row
        for micro_step in range(grad_accum_steps)
        for rank in range(world_size)
        for row in range(2)
    ]
    assert numbers == list(range(7 * 24, 8 * 24))


def test_first_sample_refuses_a_rank_outside_the_world():
    with pytest.raises(ValueError, match="rank=2"):
        first_sample(
            start=0, micro_step=0, rank=2, grad_accum_steps=1, world_size=2, micro_batch_size=1
        )


@settings(deadline=None, max_examples=50)
@given(
    first=st.integers(0, 2**40),
    size=st.integers(1, 500),
    seed=st.integers(0, 2**32),
    epoch=st.integers(10, 1000),
)
def test_shuffled_range_has_each_number_once(first, size, seed, epoch):
    order = ShuffledRange(first, first + size, seed, epoch)(np.arange(first, first + size))
    assert sorted(order.tolist()) == list(range(first, first + size))
    # no number of an epoch comes before the end of an earlier one
    epochs = order // epoch
    assert (np.diff(epochs) >= 0).all()


def test_shuffled_range_goes_round_by_round(monkeypatch):
    monkeypatch.setattr("data.sampler.ROUND", 64)
    # epochs of 100 begin at 1000 and 1100, and have rounds of 64 and 36
    borders = [1010, 1064, 1100, 1164, 1170]
    order = ShuffledRange(1010, 1170, 3, 100)(np.arange(1010, 1170))
    for begin, end in pairwise(borders):
        part = order[begin - 1010 : end - 1010].tolist()
        assert sorted(part) == list(range(begin, end))
        assert part != sorted(part)
    shuffled = ShuffledRange(1010, 1170, 3, 100)(np.arange(1169, 1009, -1))
    assert shuffled.tolist() == order.tolist()[::-1]  # any access order
    other = ShuffledRange(1010, 1170, 4, 100)(np.arange(1010, 1170))
    assert other.tolist() != order.tolist()


lengths = st.lists(st.integers(1, 30), min_size=1, max_size=40)


@settings(deadline=None)
@given(lengths, st.integers(1, 20), st.integers(0, 2**32))
def test_aligned_windows_begin_with_documents_and_do_not_overlap(lengths, context, seed):
    ends = np.cumsum(lengths)
    starts, n = np.concatenate([[0], ends[:-1]]), int(ends[-1])
    if n - 1 < context:
        with pytest.raises(ValueError, match=f"needs {context + 1}"):
            DocumentSampler(starts, n, context, seed)
        return
    sampler = DocumentSampler(starts, n, context, seed)
    epoch = sampler.windows_per_epoch
    # the definition, one document after the other
    expected, free = [], 0
    for start in starts.tolist():
        if start >= free and start + context < n:
            expected.append(start)
            free = start + context
    for number in (0, 3):
        positions = sampler.position(np.arange(number * epoch, (number + 1) * epoch))
        assert sorted(positions.tolist()) == expected
    assert sampler.cut_tokens == n - 1 - len(expected) * context
    if epoch > 5:
        first, second = sampler.position(np.arange(2 * epoch)).reshape(2, epoch)
        assert first.tolist() != second.tolist()  # a new order in each epoch


def test_aligned_sampler_refuses_bad_arguments():
    for context, seed, message in ((0, 0, "context_length=0"), (4, -1, "seed=-1")):
        with pytest.raises(ValueError, match=message):
            DocumentSampler(np.array([0, 9]), 20, context, seed)
    with pytest.raises(IndexError, match="-1"):
        DocumentSampler(np.array([0, 9]), 20, 4, 0).position(-1)
