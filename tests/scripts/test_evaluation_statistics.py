"""Means, intervals and bins, against slower and simpler ways to the same numbers."""

import math
from statistics import NormalDist

import numpy as np
import pytest

from data.shards import TokenStream
from data.tokenizer import load_tokenizer
from scripts.evaluation_statistics import (
    LEAST_DOCUMENTS,
    Corpus,
    Estimate,
    bin_name,
    describe_corpus,
    estimate,
    log_bins,
    paired_half_width,
    seed_half_width,
    widen,
)


def corpus_of(lengths):
    """Documents of these many tokens; each token is a byte."""
    document = np.repeat(np.arange(len(lengths)), lengths)
    history = np.concatenate([np.arange(n) for n in lengths])
    return Corpus(
        document=document,
        history=history,
        document_length=np.repeat(lengths, lengths),
        n_bytes=np.ones(len(document), dtype=np.int64),
        n_documents=len(lengths),
    )


def by_document(rng, lengths, spread=1.0):
    """Losses that differ between documents by `spread`, and a little within them."""
    middle = np.repeat(rng.normal(3.0, spread, len(lengths)), lengths)
    return (middle + rng.normal(0, 0.1, len(middle))).astype(np.float32)


def test_a_corpus_is_described_token_by_token(corpus):
    stream = TokenStream(corpus, "val")
    tokenizer = load_tokenizer(str(corpus))
    known = describe_corpus(stream, tokenizer.token_bytes())
    document, history = 0, 0
    lengths = np.bincount(known.document)
    for position, token in enumerate(stream.read(0, len(stream)).tolist()):
        assert known.document[position] == document
        assert known.history[position] == history
        assert known.document_length[position] == lengths[document]
        history += 1
        if token == tokenizer.eot_id:
            assert history == lengths[document] and known.n_bytes[position] == 0
            document, history = document + 1, 0
    assert document == known.n_documents == 8
    assert known.n_bytes.sum() == stream.info.text_bytes


def test_intervals_are_those_of_a_slow_bootstrap():
    rng = np.random.default_rng(1)
    lengths = rng.integers(1, 40, 30)
    known, values = corpus_of(lengths), by_document(rng, lengths)
    values[rng.random(len(values)) < 0.2] = np.nan
    tokens = [values[known.document == number] for number in range(len(lengths))]
    tokens = [some[~np.isnan(some)] for some in tokens]
    tokens = [some for some in tokens if len(some)]
    means = []
    for _ in range(4000):
        drawn = rng.integers(len(tokens), size=len(tokens))
        means.append(np.concatenate([tokens[number] for number in drawn]).mean())
    tail = NormalDist().cdf(-math.sqrt(30 / 29) * 2.0452)  # the point of Student's t for 29
    low, high = np.quantile(means, [tail, 1 - tail])
    (got,) = estimate(values, known)
    assert got.mean == pytest.approx(np.nanmean(values, dtype=np.float64), rel=1e-9)
    assert got.low == pytest.approx(low, abs=0.06 * (high - low))
    assert got.high == pytest.approx(high, abs=0.06 * (high - low))


def test_half_width_of_equal_documents_is_that_of_the_normal_distribution():
    rng = np.random.default_rng(2)
    lengths = np.full(400, 7)
    values = by_document(rng, lengths)
    (got,) = estimate(values, corpus_of(lengths))
    means = values.reshape(400, 7).mean(axis=1)
    expected = 1.96 * means.std(ddof=1) / math.sqrt(400)
    assert (got.high - got.low) / 2 == pytest.approx(expected, rel=0.06)
    assert got.low < got.mean < got.high


@pytest.mark.parametrize(("n", "point"), [(5, 2.776), (6, 2.571), (15, 2.145)])
def test_half_width_of_few_documents_is_that_of_students_t(n, point):
    ratios = []
    for seed in range(40):
        lengths = np.full(n, 5)
        values = np.repeat(np.random.default_rng(seed).normal(size=n), 5)
        (got,) = estimate(values, corpus_of(lengths), resamples=20_000, seed=seed)
        expected = point * values[::5].std(ddof=1) / math.sqrt(n)
        ratios.append((got.high - got.low) / 2 / expected)
    assert np.mean(ratios) == pytest.approx(1, abs=0.12)


def test_more_tokens_of_the_same_documents_make_nothing_surer():
    middle = np.random.default_rng(3).normal(size=50)
    few, many = (estimate(np.repeat(middle, n), corpus_of(np.full(50, n)))[0] for n in (1, 64))
    assert (many.low, many.high) == (pytest.approx(few.low), pytest.approx(few.high))


def test_bins_add_up_to_the_whole():
    rng = np.random.default_rng(4)
    lengths = rng.integers(1, 200, 40)
    known, values = corpus_of(lengths), by_document(rng, lengths)
    values[:50] = np.nan
    bins = log_bins(known.history)
    counts = np.bincount(bins[~np.isnan(values)])
    means = estimate(values, known, bins=bins)
    total = sum(some.mean * count for some, count in zip(means, counts, strict=True))
    assert total == pytest.approx(np.nansum(values, dtype=np.float64), rel=1e-9)
    for number, got in enumerate(means):
        (alone,) = estimate(np.where(bins == number, values, np.nan), known)
        assert got.mean == pytest.approx(alone.mean, rel=1e-12)
        # not of the same draws: a bin does not know how many documents there are without it
        assert got.high - got.low == pytest.approx(alone.high - alone.low, rel=0.15)
        assert got.low < got.mean < got.high


def test_documents_that_were_not_scored_do_not_count():
    rng = np.random.default_rng(5)
    lengths = np.array([9, 4, 30, 4, 11, 6, 2])
    values = by_document(rng, lengths)
    without = np.concatenate([values[:13], values[43:]])
    values[13:43] = np.nan
    (got,) = estimate(values, corpus_of(lengths))
    assert [got] == estimate(without, corpus_of([9, 4, 4, 11, 6, 2]))
    assert got.low < got.mean < got.high


def test_nothing_to_count_is_nan():
    known = corpus_of([3] * 6)
    values = np.array([1.0, 2.0, np.nan, 3.0, 4.0, np.nan] * 3)
    first, empty, last = estimate(values, known, bins=np.array([0, 2, 2, 0, 2, 1] * 3))
    assert (first.mean, last.mean) == (2.0, 3.0)
    assert (first.low, first.high) == (1.0, 3.0)
    assert all(math.isnan(number) for number in (empty.mean, empty.low, empty.high))
    for nothing in estimate(np.full(18, np.nan), known, bins=np.array([0, 1] * 9)):
        assert all(math.isnan(number) for number in (nothing.mean, nothing.low, nothing.high))


@pytest.mark.parametrize("n", range(1, LEAST_DOCUMENTS + 2))
def test_fewer_documents_have_a_mean_and_no_interval(n):
    values = np.append(np.arange(2.0 * n), np.nan)
    (got,) = estimate(values, corpus_of([2] * n + [1]))
    assert got.mean == pytest.approx(n - 0.5)
    missing = n < LEAST_DOCUMENTS
    assert (math.isnan(got.low), math.isnan(got.high)) == (missing, missing)
    both = widen(got, 0.1)
    assert (math.isnan(both.low), math.isnan(both.high)) == (missing, missing)


def test_documents_are_counted_bin_by_bin():
    """The first bin holds a token of all but one document, the second of each."""
    bins = np.array([0, 1] * (LEAST_DOCUMENTS - 1) + [1, 1])
    few, enough = estimate(np.arange(len(bins)), corpus_of([2] * LEAST_DOCUMENTS), bins=bins)
    assert math.isnan(few.low) and math.isnan(few.high)
    assert enough.low < enough.mean < enough.high


def test_the_same_seed_draws_the_same_documents():
    rng = np.random.default_rng(6)
    lengths = np.full(20, 3)
    values, known = by_document(rng, lengths), corpus_of(lengths)
    assert estimate(values, known, seed=1) == estimate(values, known, seed=1)
    assert estimate(values, known, seed=1) != estimate(values, known, seed=2)


def test_bins_at_powers_of_two():
    numbers = np.array([0, 1, 2, 3, 4, 7, 8, 1023, 1024, 2**17 - 1, 2**17])
    assert log_bins(numbers).tolist() == [0, 1, 2, 2, 3, 3, 4, 10, 11, 17, 18]
    every = np.arange(70_000)
    assert log_bins(every).tolist() == [int(number).bit_length() for number in every]
    names = [bin_name(number) for number in (0, 1, 2, 3, 11)]
    assert names == ["0", "1", "2 to 3", "4 to 7", "1,024 to 2,047"]


def test_interval_of_seeds_by_hand():
    # variances 1 and 2, standard error sqrt(1/3 + 2/2), one degree of freedom
    assert seed_half_width([1.0, 2.0, 3.0], [2.0, 4.0]) == pytest.approx(12.706 * 1.154700538)
    assert seed_half_width([2.0, 4.0], [1.0, 2.0, 3.0]) == pytest.approx(12.706 * 1.154700538)
    assert seed_half_width([1.0, 2.0, 3.0], [5.0, 5.0, 8.0]) == pytest.approx(
        4.303 * math.sqrt(1 / 3 + 3 / 3)
    )
    assert seed_half_width([1.0], [2.0, 4.0]) is None
    assert seed_half_width([1.0, 2.0], [2.0]) is None
    same = [5.0] * 7 + [7.0] * 7
    assert seed_half_width(same, same) == pytest.approx(
        2.160 * math.sqrt(2 * 14 / 13 / 14), rel=1e-3
    )


def test_interval_of_pairs_by_hand():
    assert paired_half_width([1.0, 3.0]) == pytest.approx(12.706)  # sd sqrt(2), over sqrt(2)
    assert paired_half_width([1.0, 2.0, 3.0]) == pytest.approx(4.303 / 3**0.5)
    assert paired_half_width([1.0]) is None


@pytest.mark.parametrize("freedom", [*range(1, 13), 20, 99])
def test_points_of_student(freedom):
    """The density of Student's t holds 47.5% between 0 and the point."""
    n = freedom + 1
    sample = [0.0] * (n - 1) + [math.sqrt(n)]  # of variance 1
    point = seed_half_width(sample, sample)
    assert point is not None
    point /= math.sqrt(2 / n)
    scale = math.gamma(n / 2) / (math.sqrt(freedom * math.pi) * math.gamma(freedom / 2))
    t = np.linspace(0, point, 100_001)
    density = scale * (1 + t**2 / freedom) ** (-n / 2)
    area = (density[1:] + density[:-1]).sum() / 2 * (t[1] - t[0])
    assert area == pytest.approx(0.475, abs=2e-5 if freedom < 11 else 1e-4)


def test_seeds_widen_the_interval_around_its_mean():
    documents = Estimate(mean=1.0, low=0.7, high=1.4)
    assert widen(documents, None) == documents
    both = widen(documents, 0.4)
    assert both.mean == 1.0
    assert both.low == pytest.approx(1 - 0.5)
    assert both.high == pytest.approx(1 + math.sqrt(0.32))
