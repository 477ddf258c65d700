"""Means, intervals and bins, compared with slower and simpler computations."""

import math
from statistics import NormalDist

import numpy as np
import pytest

from evaluation.statistics import (
    MIN_DOCUMENTS,
    Estimate,
    estimate,
    paired_half_width,
    pooled_half_width,
    seed_half_width,
    widen,
    wilson,
)
from evaluation.sums import Sums, log_bins


def sums_of(values, lengths, bins=None):
    """Sum the values of tokens in documents of these lengths; NaN does not count."""
    bins = np.zeros(len(values), dtype=np.int64) if bins is None else bins
    shape = len(lengths), bins.max() + 1
    nats, tokens = np.zeros(shape), np.zeros(shape, dtype=np.int64)
    document = np.repeat(np.arange(len(lengths)), lengths)
    for value, place in zip(values.tolist(), zip(document, bins, strict=True), strict=True):
        if not math.isnan(value):
            nats[place] += value
            tokens[place] += 1
    return Sums(nats=nats, tokens=tokens, n_bytes=0)


def by_document(rng, lengths, spread=1.0):
    """Losses that differ between documents by `spread`, and a little within them."""
    middle = np.repeat(rng.normal(3.0, spread, len(lengths)), lengths)
    return (middle + rng.normal(0, 0.1, len(middle))).astype(np.float32)


def test_intervals_match_a_slow_bootstrap():
    rng = np.random.default_rng(1)
    lengths = rng.integers(1, 40, 30)
    values = by_document(rng, lengths)
    values[rng.random(len(values)) < 0.2] = np.nan
    tokens = np.split(values, np.cumsum(lengths)[:-1])
    tokens = [some[~np.isnan(some)] for some in tokens]
    tokens = [some for some in tokens if len(some)]
    means = []
    for _ in range(4000):
        drawn = rng.integers(len(tokens), size=len(tokens))
        means.append(np.concatenate([tokens[number] for number in drawn]).mean())
    tail = NormalDist().cdf(-math.sqrt(30 / 29) * 2.0452)  # the point of Student's t for 29
    low, high = np.quantile(means, [tail, 1 - tail])
    (got,) = estimate(sums_of(values, lengths))
    assert got.mean == pytest.approx(np.nanmean(values, dtype=np.float64), rel=1e-9)
    assert got.low == pytest.approx(low, abs=0.06 * (high - low))
    assert got.high == pytest.approx(high, abs=0.06 * (high - low))


def test_half_width_of_equal_documents_matches_the_normal_distribution():
    rng = np.random.default_rng(2)
    lengths = np.full(400, 7)
    values = by_document(rng, lengths)
    (got,) = estimate(sums_of(values, lengths))
    means = values.reshape(400, 7).mean(axis=1)
    expected = 1.96 * means.std(ddof=1) / math.sqrt(400)
    assert (got.high - got.low) / 2 == pytest.approx(expected, rel=0.06)
    assert got.low < got.mean < got.high


@pytest.mark.parametrize(("n", "point"), [(5, 2.776), (6, 2.571), (15, 2.145)])
def test_half_width_of_few_documents_matches_students_t(n, point):
    ratios = []
    for seed in range(40):
        lengths = np.full(n, 5)
        values = np.repeat(np.random.default_rng(seed).normal(size=n), 5)
        (got,) = estimate(sums_of(values, lengths), resamples=20_000, seed=seed)
        expected = point * values[::5].std(ddof=1) / math.sqrt(n)
        ratios.append((got.high - got.low) / 2 / expected)
    assert np.mean(ratios) == pytest.approx(1, abs=0.12)


def test_short_documents_do_not_narrow_the_interval_of_few_long_ones():
    """20 documents hold 99% of the tokens: 400 more documents add no certainty."""
    ratios = []
    for seed in range(20):
        effects = np.random.default_rng(seed).normal(size=20)
        long = np.repeat(effects, 2000)
        (few,) = estimate(sums_of(long, [2000] * 20), resamples=1000, seed=seed)
        more = np.append(long, np.full(400, effects.mean()))
        (many,) = estimate(sums_of(more, [2000] * 20 + [1] * 400), resamples=1000, seed=seed)
        ratios.append((many.high - many.low) / (few.high - few.low))
    assert 1 < np.mean(ratios) < 1.06  # 0.95 if all 420 counted as equally long


def test_no_interval_if_few_documents_hold_almost_all_tokens():
    lengths = [100] * (MIN_DOCUMENTS - 1) + [1] * 4
    values = np.random.default_rng(0).normal(size=sum(lengths))
    (got,) = estimate(sums_of(values, lengths))
    assert math.isfinite(got.mean) and math.isnan(got.low)


def test_more_tokens_of_the_same_documents_do_not_narrow_the_interval():
    middle = np.random.default_rng(3).normal(size=50)
    few, many = (estimate(sums_of(np.repeat(middle, n), [n] * 50))[0] for n in (1, 64))
    assert (many.low, many.high) == (pytest.approx(few.low), pytest.approx(few.high))


def test_bins_add_up_to_the_whole():
    rng = np.random.default_rng(4)
    lengths = rng.integers(1, 200, 40)
    values = by_document(rng, lengths)
    values[:50] = np.nan
    bins = log_bins(np.concatenate([np.arange(n) for n in lengths]))
    counts = np.bincount(bins[~np.isnan(values)])
    means = estimate(sums_of(values, lengths, bins))
    total = sum(some.mean * count for some, count in zip(means, counts, strict=True))
    assert total == pytest.approx(np.nansum(values, dtype=np.float64), rel=1e-9)
    for number, got in enumerate(means):
        (alone,) = estimate(sums_of(np.where(bins == number, values, np.nan), lengths))
        assert got.mean == pytest.approx(alone.mean, rel=1e-12)
        # the draws differ: a bin does not know the number of documents outside it
        assert got.high - got.low == pytest.approx(alone.high - alone.low, rel=0.15)
        assert got.low < got.mean < got.high


def test_documents_that_were_not_scored_do_not_count():
    rng = np.random.default_rng(5)
    lengths = np.array([9, 4, 30, 4, 11, 6, 8])
    values = by_document(rng, lengths)
    without = np.concatenate([values[:13], values[43:]])
    values[13:43] = np.nan
    (got,) = estimate(sums_of(values, lengths))
    assert [got] == estimate(sums_of(without, [9, 4, 4, 11, 6, 8]))
    assert got.low < got.mean < got.high


def test_empty_bins_are_nan():
    lengths = [3] * 6
    values = np.array([1.0, 2.0, np.nan, 3.0, 4.0, np.nan] * 3)
    first, empty, last = estimate(sums_of(values, lengths, np.array([0, 2, 2, 0, 2, 1] * 3)))
    assert (first.mean, last.mean) == (2.0, 3.0)
    assert (first.low, first.high) == (1.0, 3.0)
    assert all(math.isnan(number) for number in (empty.mean, empty.low, empty.high))
    for nothing in estimate(sums_of(np.full(18, np.nan), lengths, np.array([0, 1] * 9))):
        assert all(math.isnan(number) for number in (nothing.mean, nothing.low, nothing.high))


@pytest.mark.parametrize("n", range(1, MIN_DOCUMENTS + 2))
def test_few_documents_have_a_mean_but_no_interval(n):
    values = np.append(np.arange(2.0 * n), np.nan)
    (got,) = estimate(sums_of(values, [2] * n + [1]))
    assert got.mean == pytest.approx(n - 0.5)
    missing = n < MIN_DOCUMENTS
    assert (math.isnan(got.low), math.isnan(got.high)) == (missing, missing)
    both = widen(got, 0.1)
    assert (math.isnan(both.low), math.isnan(both.high)) == (missing, missing)


def test_the_effective_number_of_documents_is_rounded():
    for long, enough in ((3, True), (5, False)):  # worth 4.84 and 4.12 documents of equal length
        lengths = [long] + [2] * 4
        assert round(sum(lengths) ** 2 / sum(n**2 for n in lengths)) == (5 if enough else 4)
        (got,) = estimate(sums_of(np.arange(float(sum(lengths))), lengths))
        assert math.isfinite(got.low) == math.isfinite(got.high) == enough


def test_a_difference_counts_only_shared_documents():
    values = np.arange(16.0)
    lengths = [2] * 8
    lacking = np.where(np.arange(16) < 8, np.nan, values)  # the first four documents
    for mine, theirs in ((values, lacking), (lacking, values)):
        (got,) = estimate(sums_of(mine, lengths), sums_of(theirs, lengths))
        assert math.isfinite(got.mean) and math.isnan(got.low) and math.isnan(got.high)
    early = np.where(np.arange(16) < 12, values, np.nan)  # the first six documents
    late = np.where(np.arange(16) < 4, np.nan, values)  # shares four of them
    (got,) = estimate(sums_of(early, lengths), sums_of(late, lengths))
    assert got.mean == pytest.approx(5.5 - 9.5) and math.isnan(got.low)
    # for the same documents, the more uneven token counts decide
    even, uneven = sums_of(np.arange(12.0), [2] * 6), sums_of(np.arange(35.0), [30, *[1] * 5])
    for mine, theirs in ((even, uneven), (uneven, even)):
        (got,) = estimate(mine, theirs)
        assert math.isfinite(got.mean) and math.isnan(got.low)


def test_documents_are_counted_per_bin():
    """The first bin has a token of every document but one, the second of every document."""
    bins = np.array([0, 1] * (MIN_DOCUMENTS - 1) + [1])
    lengths = [2] * (MIN_DOCUMENTS - 1) + [1]
    few, enough = estimate(sums_of(np.arange(len(bins)), lengths, bins))
    assert math.isnan(few.low) and math.isnan(few.high)
    assert enough.low < enough.mean < enough.high


def test_the_same_seed_draws_the_same_documents():
    rng = np.random.default_rng(6)
    lengths = np.full(20, 3)
    sums = sums_of(by_document(rng, lengths), lengths)
    assert estimate(sums, seed=1) == estimate(sums, seed=1)
    assert estimate(sums, seed=1) != estimate(sums, seed=2)


def test_differences_are_paired_by_document():
    rng = np.random.default_rng(7)
    lengths = rng.integers(1, 40, 30)
    hard = by_document(rng, lengths, spread=5.0)
    gain = by_document(rng, lengths, spread=0.1)
    (got,) = estimate(sums_of(hard + gain, lengths), sums_of(hard, lengths))
    (alone,) = estimate(sums_of(gain, lengths))
    for name in ("mean", "low", "high"):
        assert getattr(got, name) == pytest.approx(getattr(alone, name), abs=1e-5)


def test_a_difference_over_different_tokens_is_that_of_the_means():
    lengths = [4] * 6
    values = np.arange(24.0)
    fewer = np.where(
        np.arange(24) % 4 == 3, np.nan, values
    )  # without the last token of each document
    bins = np.arange(24) % 4
    (got,) = estimate(sums_of(values, lengths), sums_of(fewer, lengths))
    assert (got.mean, got.low, got.high) == pytest.approx((0.5, 0.5, 0.5))
    *same, only_here = estimate(sums_of(values, lengths, bins), sums_of(fewer, lengths, bins))
    assert [some.mean for some in same] == [0, 0, 0]
    assert math.isnan(only_here.mean) and math.isnan(only_here.low)
    elsewhere = np.where(np.arange(24) < 20, np.nan, values)  # only the last document
    (got,) = estimate(sums_of(fewer[:20], [*lengths[:5], 0]), sums_of(elsewhere, lengths))
    assert got.mean == pytest.approx(np.nanmean(fewer[:20]) - 21.5)
    assert math.isnan(got.low)  # no document has both
    few_bins = sums_of(fewer[bins < 2], [2] * 6, bins[bins < 2])
    means = [some.mean for some in estimate(sums_of(values, lengths, bins), few_bins)]
    assert means[:2] == [0, 0] and all(math.isnan(mean) for mean in means[2:])
    assert len(estimate(few_bins, sums_of(values, lengths, bins))) == 2


def test_interval_of_seeds_by_hand():
    # variances 1 and 2, standard error sqrt(1/3 + 2/2), one degree of freedom
    assert seed_half_width([1.0, 2.0, 3.0], [2.0, 4.0]) == pytest.approx(12.706205 * 1.154700538)
    assert seed_half_width([2.0, 4.0], [1.0, 2.0, 3.0]) == pytest.approx(12.706205 * 1.154700538)
    assert seed_half_width([1.0, 2.0, 3.0], [5.0, 5.0, 8.0]) == pytest.approx(
        4.302653 * math.sqrt(1 / 3 + 3 / 3)
    )
    assert seed_half_width([1.0], [2.0, 4.0]) is None
    assert seed_half_width([1.0, 2.0], [2.0]) is None
    same = [5.0] * 7 + [7.0] * 7
    assert seed_half_width(same, same) == pytest.approx(
        2.160 * math.sqrt(2 * 14 / 13 / 14), rel=1e-3
    )


def test_interval_of_pairs_by_hand():
    assert paired_half_width([1.0, 3.0]) == pytest.approx(12.706205)  # sd sqrt(2), over sqrt(2)
    assert paired_half_width([1.0, 2.0, 3.0]) == pytest.approx(4.302653 / 3**0.5)
    assert paired_half_width([1.0]) is None


def test_comparisons_pool_the_variance_between_their_seeds():
    samples = [[1.0, 3.0], [0.0, 4.0, 5.0]]  # variances 2 and 7, with 1 and 2 degrees of freedom
    several = [(len(sample), paired_half_width(sample)) for sample in samples]
    deviation = ((2 + 2 * 7) / 3) ** 0.5
    for n in (1, 2, 3):
        half_width = pooled_half_width(n, several)
        assert half_width == pytest.approx(3.182446 * deviation / n**0.5)
    assert pooled_half_width(2, several[:1]) == pytest.approx(several[0][1])
    assert pooled_half_width(1, []) is None


@pytest.mark.parametrize(
    ("share", "n", "low", "high"),
    [(0.5, 100, 0.4038, 0.5962), (0.0, 10, 0.0, 0.2775), (1.0, 10, 0.7225, 1.0),
     (0.37, 2000, 0.3491, 0.3914), (0.81, 300, 0.7618, 0.8504)],
)  # fmt: skip
def test_wilson_interval(share, n, low, high):
    assert wilson(share, n) == pytest.approx((low, high), abs=1e-4)


def test_seeds_widen_the_interval_around_its_mean():
    documents = Estimate(mean=1.0, low=0.7, high=1.4)
    assert widen(documents, None) == documents
    both = widen(documents, 0.4)
    assert both.mean == 1.0
    assert both.low == pytest.approx(1 - 0.5)
    assert both.high == pytest.approx(1 + math.sqrt(0.32))
