"""Means of token losses and how sure they are: documents are what varies, not tokens.

Neighbouring tokens share a document, so intervals come from a bootstrap that draws whole documents
(a cluster bootstrap: Field and Welsh 2007, doi 10.1111/j.1467-9868.2007.00593.x). Two models are
compared in the same draws.
"""

import math
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from evaluation.sums import LEAST_DOCUMENTS, Sums, effective_number

_t_975 = partial(stats.t.ppf, 0.975)  # the two-sided 95% point, by degrees of freedom


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean and the interval that holds it with 95% confidence, nats.

    NaN where nothing counts; low and high also where fewer than LEAST_DOCUMENTS do.
    """

    mean: float
    low: float
    high: float


def estimate(
    of: Sums, minus: Sums | None = None, *, resamples: int = 4000, seed: int = 0
) -> list[Estimate]:
    """Mean of each bin, or what it differs by, with the interval of a bootstrap over documents.

    A bootstrap of few documents is too narrow: its percentiles are moved out as far as Student's t
    is wider than a normal distribution (Hesterberg, arXiv 1411.5279: the "expanded
    percentile" interval). Of many, few may hold most of the tokens: they count as so many of equal
    length whose mean varies as much, (sum w)^2 / sum w^2 with w the tokens (Kish 1965, Survey
    Sampling).

    Equal documents are drawn `of` and `minus`, so that what is hard in both cancels; each mean is
    over the tokens of one alone. All bins share the draws.
    """
    terms, n_bins = [of] if minus is None else [of, minus], of.tokens.shape[1]
    counts = np.array([with_bins(term.tokens, n_bins) for term in terms], dtype=np.float64)
    sums = np.array([with_bins(term.nats, n_bins) for term in terms])
    # documents without a scored token tell nothing
    present = np.flatnonzero(counts.any(axis=(0, 2)))
    if len(present) == 0:
        return [Estimate(mean=math.nan, low=math.nan, high=math.nan)] * n_bins
    draws = _draws(len(present), resamples, seed)
    drawn, middle = np.zeros((resamples, n_bins)), np.zeros(n_bins)
    with np.errstate(invalid="ignore"):  # 0 / 0 where a draw has no token of a bin
        for sign, nats, tokens in zip((1, -1), sums, counts, strict=False):
            drawn += sign * ((draws @ nats[present]) / (draws @ tokens[present]))
            middle += sign * (nats.sum(axis=0) / tokens.sum(axis=0))
    shared = counts * np.all(counts, axis=0)
    documents = np.min([effective_number(term) for term in shared], axis=0)
    result = []
    for mean, of_bin, effective in zip(middle, drawn.T, documents, strict=True):
        low = high = math.nan
        if round(effective) >= LEAST_DOCUMENTS:
            # the share of the draws to leave out on each side
            expanded = math.sqrt(effective / (effective - 1)) * _t_975(effective - 1)
            tail = stats.norm.cdf(-expanded)
            low, high = np.nanquantile(of_bin, [tail, 1 - tail])
        result.append(Estimate(mean=float(mean), low=float(low), high=float(high)))
    return result


def with_bins(table: np.ndarray, n_bins: int) -> np.ndarray:
    """(n_documents, n_bins): empty bins added, or those that the other does not have left out."""
    missing = max(0, n_bins - table.shape[1])
    return np.pad(table, ((0, 0), (0, missing)))[:, :n_bins]


# drawing takes longer than all else, and rows of a table share their draws; chunks and windows that
# slide may score another number of documents
@lru_cache(maxsize=2)
def _draws(n_documents: int, resamples: int, seed: int) -> np.ndarray:
    """How often each draw has each document: (resamples, n_documents), float64 to be fast."""
    chances = np.full(n_documents, 1 / n_documents)
    draws = np.random.default_rng(seed).multinomial(n_documents, chances, size=resamples)
    return draws.astype(np.float64)


def seed_half_width(a: ArrayLike, b: ArrayLike) -> float | None:
    """Half the 95% interval of mean(b) - mean(a) over independent seeds, nats.

    Welch's standard error with the degrees of freedom of the smaller sample, the cautious choice.
    None where a sample has a single seed.
    """
    smaller = min(np.size(a), np.size(b))
    if smaller < 2:
        return None
    return float(_t_975(smaller - 1)) * math.hypot(stats.sem(a), stats.sem(b))


def paired_half_width(differences: ArrayLike) -> float | None:
    """Half the 95% interval of the mean difference over pairs of seeds, nats; None for one pair.

    Student's t. What both runs of a pair have in common, such as the weights that they start with,
    does not widen it.
    """
    n = np.size(differences)
    return None if n < 2 else float(_t_975(n - 1) * stats.sem(differences))


def wilson(share: float, n: int) -> tuple[float, float]:
    """The 95% interval of a probability of which n draws gave `share` (Wilson 1927)."""
    found = stats.binomtest(round(share * n), n).proportion_ci(method="wilson")
    return float(found.low), float(found.high)


def widen(document: Estimate, seeds: float | None) -> Estimate:
    """The interval of a difference that also counts the seeds, whose errors are independent."""
    if seeds is None:
        return document
    mean = document.mean
    low, high = (math.hypot(end - mean, seeds) for end in (document.low, document.high))
    return Estimate(mean=mean, low=mean - low, high=mean + high)
