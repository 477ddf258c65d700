"""Mean token losses and their confidence intervals, by a bootstrap over documents.

The losses of tokens in one document are correlated. The bootstrap therefore draws whole documents
(a cluster bootstrap: Field and Welsh 2007, doi 10.1111/j.1467-9868.2007.00593.x). Two models are
compared on the same draws.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from evaluation.sums import MIN_DOCUMENTS, Sums, effective_number

_t_975 = partial(stats.t.ppf, 0.975)  # the two-sided 95% point, by degrees of freedom


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Mean and 95% confidence interval, nats.

    All are NaN if no token counts. low and high are also NaN for fewer than MIN_DOCUMENTS.
    """

    mean: float
    low: float
    high: float


def estimate(
    of: Sums, minus: Sums | None = None, *, resamples: int = 4000, seed: int = 0
) -> list[Estimate]:
    """Estimate the mean of each bin, or its difference to `minus`, with a bootstrap over documents.

    The bootstrap interval of few documents is too narrow. Its percentiles are therefore widened by
    the ratio of Student's t to the normal distribution (Hesterberg, arXiv 1411.5279: the "expanded
    percentile" interval).

    A few long documents may contain most tokens. The number of documents is therefore that of equal
    length whose mean has the same variance (`effective_number`).

    The same documents are drawn from `of` and `minus`, so that their difficulty cancels. Each mean
    is over its own tokens. All bins share the draws.
    """
    terms, n_bins = [of] if minus is None else [of, minus], of.tokens.shape[1]
    counts = np.array([with_bins(term.tokens, n_bins) for term in terms], dtype=np.float64)
    sums = np.array([with_bins(term.nats, n_bins) for term in terms])
    # documents without a scored token carry no information
    present = np.flatnonzero(counts.any(axis=(0, 2)))
    if len(present) == 0:
        return [Estimate(mean=math.nan, low=math.nan, high=math.nan)] * n_bins
    draws = _draws(len(present), resamples, seed)
    resampled, means = np.zeros((resamples, n_bins)), np.zeros(n_bins)
    with np.errstate(invalid="ignore"):  # 0 / 0 if a draw has no token in a bin
        for sign, nats, tokens in zip((1, -1), sums, counts, strict=False):
            resampled += sign * ((draws @ nats[present]) / (draws @ tokens[present]))
            means += sign * (nats.sum(axis=0) / tokens.sum(axis=0))
    shared = counts * np.all(counts, axis=0)
    documents = np.min([effective_number(term) for term in shared], axis=0)
    result = []
    for mean, resampled_bin, effective in zip(means, resampled.T, documents, strict=True):
        low = high = math.nan
        if round(effective) >= MIN_DOCUMENTS:
            # share of the draws beyond each end of the interval
            expanded = math.sqrt(effective / (effective - 1)) * _t_975(effective - 1)
            tail = stats.norm.cdf(-expanded)
            low, high = np.nanquantile(resampled_bin, [tail, 1 - tail])
        result.append(Estimate(mean=float(mean), low=float(low), high=float(high)))
    return result


def with_bins(table: np.ndarray, n_bins: int) -> np.ndarray:
    """Pad a table with empty bins, or truncate it, to (n_documents, n_bins)."""
    missing = max(0, n_bins - table.shape[1])
    return np.pad(table, ((0, 0), (0, missing)))[:, :n_bins]


# Drawing is the slowest part, and the rows of a table share their draws. Two entries: chunks and
# sliding windows may score different numbers of documents.
@lru_cache(maxsize=2)
def _draws(n_documents: int, resamples: int, seed: int) -> np.ndarray:
    """Count of each document in each draw, (resamples, n_documents); float64 for fast matmuls."""
    chances = np.full(n_documents, 1 / n_documents)
    draws = np.random.default_rng(seed).multinomial(n_documents, chances, size=resamples)
    return draws.astype(np.float64)


def seed_half_width(a: ArrayLike, b: ArrayLike) -> float | None:
    """Half width of the 95% interval of mean(b) - mean(a) over independent seeds, nats.

    Welch's standard error with the degrees of freedom of the smaller sample, which is conservative.
    None if either sample has a single seed.
    """
    smaller = min(np.size(a), np.size(b))
    if smaller < 2:
        return None
    return float(_t_975(smaller - 1)) * math.hypot(stats.sem(a), stats.sem(b))


def paired_half_width(differences: ArrayLike) -> float | None:
    """Half width of the 95% interval of the mean difference over pairs of seeds, nats.

    Uses Student's t. Whatever the runs of a pair share, such as their initial weights, does not
    widen the interval. None for a single pair.
    """
    n = np.size(differences)
    return None if n < 2 else float(_t_975(n - 1) * stats.sem(differences))


def pooled_half_width(n: int, others: Iterable[tuple[int, float]]) -> float | None:
    """Half width of the 95% interval of the mean difference over n pairs of seeds, nats.

    The variance between pairs is pooled over comparisons that are taken to vary alike, as in an
    analysis of variance. A comparison with one pair has an interval too.

    Args:
        n: pairs of this comparison.
        others: number of pairs (at least two) and `paired_half_width` of each comparison.

    Returns:
        None without others.
    """
    freedom, squares = 0, 0.0
    for pairs, half_width in others:
        freedom += pairs - 1
        squares += (pairs - 1) * pairs * (half_width / _t_975(pairs - 1)) ** 2
    return float(_t_975(freedom) * math.sqrt(squares / freedom / n)) if freedom else None


def wilson(share: float, n: int) -> tuple[float, float]:
    """95% interval of a probability, given the observed `share` in n trials (Wilson 1927)."""
    interval = stats.binomtest(round(share * n), n).proportion_ci(method="wilson")
    return float(interval.low), float(interval.high)


def widen(document: Estimate, seeds: float | None) -> Estimate:
    """Widen a document interval by the half width over seeds, whose errors are independent."""
    if seeds is None:
        return document
    mean = document.mean
    low, high = (math.hypot(end - mean, seeds) for end in (document.low, document.high))
    return Estimate(mean=mean, low=mean - low, high=mean + high)
