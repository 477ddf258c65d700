"""A mixture is a pure function of seed and number, with exact shares."""

import numpy as np
import pytest
import torch

from data.text.batches import TrainBatches
from data.text.mixture import ROUND, MixedBatches, Mixture
from data.text.shards import TokenStream

CONTEXT = 8


@pytest.fixture(scope="module")
def streams(corpus, other_corpus):
    return [TokenStream(corpus, "train"), TokenStream(other_corpus, "train")]


def batches(streams, seed: int = 5, **options) -> MixedBatches:
    corpora = [TrainBatches(stream, CONTEXT, seed, **options) for stream in streams]
    return MixedBatches(corpora, Mixture([3, 1], seed))


@pytest.mark.parametrize("weights", [[1, 1], [3, 1], [0.7, 0.2, 0.1], [1000, 1], [1, 3, 5, 7, 11]])
def test_shares_are_exact_in_each_round(weights: list[float]) -> None:
    mixture = Mixture(weights, seed=1)
    assert sum(mixture.quotas) == ROUND
    for quota, weight in zip(mixture.quotas, weights, strict=True):
        assert abs(quota - ROUND * weight / sum(weights)) <= 1
    for start in (0, 7 * ROUND):
        corpus, _ = mixture.assign(np.arange(start, start + ROUND))
        assert np.bincount(corpus).tolist() == mixture.quotas


def test_each_corpus_is_read_from_its_first_sample_on_without_a_gap() -> None:
    mixture = Mixture([3, 1], seed=1)
    corpus, numbers = mixture.assign(np.arange(3 * ROUND))
    for index in range(2):
        mine = numbers[corpus == index]
        assert sorted(mine.tolist()) == [*range(3 * mixture.quotas[index])]


def test_corpora_alternate_and_the_seed_decides_how() -> None:
    corpus, _ = Mixture([1, 1], seed=1).assign(np.arange(200))
    assert 60 < corpus.sum() < 140  # also in any small number of samples
    other, _ = Mixture([1, 1], seed=2).assign(np.arange(200))
    assert (corpus != other).any()
    next_round, _ = Mixture([1, 1], seed=1).assign(np.arange(ROUND, ROUND + 200))
    assert (corpus != next_round).any()


@pytest.mark.parametrize("consecutive", [1, 3])
def test_batches_are_the_same_however_they_are_cut(streams, consecutive: int) -> None:
    mixed = batches(streams, document_mask=True, consecutive_windows=consecutive)
    whole = mixed.batch(5, 12)
    parts = [mixed.batch(5 + first, 4) for first in range(0, 12, 4)]
    for name in ("tokens", "targets", "doc_start"):
        expected = torch.cat([getattr(part, name) for part in parts])
        assert torch.equal(getattr(whole, name), expected)
        assert getattr(whole, name).is_contiguous()
    assert torch.equal(whole.tokens[:, 1:], whole.targets[:, :-1])
    assert batches(streams).batch(5, 12).doc_start is None


def test_rows_are_those_of_their_corpus(streams) -> None:
    mixed = batches(streams)
    corpus, numbers = mixed.mixture.assign(np.arange(40))
    batch = mixed.batch(0, 40)
    assert set(corpus.tolist()) == {0, 1}
    for row, (index, number) in enumerate(zip(corpus.tolist(), numbers.tolist(), strict=True)):
        alone = mixed.corpora[index].batch(number, 1)
        assert torch.equal(batch.tokens[row], alone.tokens[0])


def test_consecutive_windows_stay_together(streams) -> None:
    batch = batches(streams, consecutive_windows=3).batch(0, 30)
    for first in range(0, 30, 3):
        for row in (first, first + 1):
            assert batch.targets[row, -1] == batch.tokens[row + 1, 0]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0, 0.0], "weight=0.0 of a corpus must be a finite number above 0"),
        ([1.0, float("nan")], "weight=nan of a corpus"),
        ([5000.0, 1.0], r"weight=1.0 must be at least 1/4096 of 5001"),
    ],
)
def test_weights_that_cannot_be(weights: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Mixture(weights, seed=0)
