"""Means of token losses and how sure they are: documents are what varies, not tokens.

Neighbouring tokens share a document, so intervals come from a bootstrap that draws whole documents
(a cluster bootstrap: Field and Welsh 2007, doi 10.1111/j.1467-9868.2007.00593.x). Two models are
compared on the same tokens, by the differences of their losses.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from data.shards import TokenStream

RESAMPLES = 4000
LEAST_DOCUMENTS = 5
"""Fewer have no interval: means of so few draws cannot lie far enough out."""

_T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_Z_975 = 1.959964


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean and the interval that holds it with 95% confidence, nats.

    NaN where nothing counts; low and high also where all is of fewer than LEAST_DOCUMENTS, which
    do not tell how others would differ.
    """

    mean: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """What is known of each token of a validation stream; arrays are (n_tokens,)."""

    document: np.ndarray
    """Number of its document."""
    history: np.ndarray
    """Tokens before it in its document."""
    document_length: np.ndarray
    """Tokens of its document, the end of text included."""
    n_bytes: np.ndarray
    """UTF-8 bytes that it stands for; 0 for the end of text."""
    n_documents: int
    """In the stream."""


def describe_corpus(stream: TokenStream, token_bytes: np.ndarray) -> Corpus:
    """The facts about every token of `stream`.

    Args:
        stream: a validation split.
        token_bytes: (vocab_size,) bytes of each entry of the tokenizer.
    """
    starts = stream.document_starts
    lengths = np.diff(np.append(starts, len(stream)))
    document = np.repeat(np.arange(len(starts)), lengths)
    return Corpus(
        document=document,
        history=np.arange(len(stream)) - starts[document],
        document_length=lengths[document],
        n_bytes=token_bytes[stream.read(0, len(stream))],
        n_documents=len(starts),
    )


def log_bins(lengths: np.ndarray) -> np.ndarray:
    """Bin b of 1 and more holds [2^(b-1), 2^b), bin 0 holds 0."""
    return np.ceil(np.log2(lengths + 1.0)).astype(np.int64)


def bin_name(number: int) -> str:
    """The numbers in a bin of `log_bins`."""
    if number <= 1:
        return str(number)
    return f"{2 ** (number - 1):,} to {2**number - 1:,}"


def estimate(
    values: np.ndarray,
    corpus: Corpus,
    *,
    bins: np.ndarray | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> list[Estimate]:
    """Mean of `values` in each bin, with the interval of a bootstrap over documents.

    A bootstrap of few documents is too narrow: its percentiles are moved out as far as Student's t
    is wider than a normal distribution (Hesterberg, arXiv 1411.5279: the "expanded
    percentile" interval).

    Args:
        values: (n_tokens,) losses or differences of losses; NaN does not count.
        corpus: which document each belongs to.
        bins: (n_tokens,) numbers from 0; None puts all tokens into one bin.
        resamples: sets of documents that are drawn.
        seed: of the draws: the same documents are drawn for all bins.
    """
    counted = ~np.isnan(values)
    bins = np.zeros(len(values), dtype=np.int64) if bins is None else bins
    n_bins = int(bins.max()) + 1
    cell = bins[counted] * corpus.n_documents + corpus.document[counted]
    shape = (n_bins, corpus.n_documents)
    size = n_bins * corpus.n_documents
    counts = np.bincount(cell, minlength=size).reshape(shape)
    sums = np.bincount(cell, weights=values[counted].astype(np.float64), minlength=size)
    sums = sums.reshape(shape)

    present = np.flatnonzero(counts.sum(axis=0))  # documents without a scored token tell nothing
    if len(present) == 0:
        return [Estimate(mean=math.nan, low=math.nan, high=math.nan)] * n_bins
    counts, sums = counts[:, present], sums[:, present]
    draws = _draws(len(present), resamples, seed)
    with np.errstate(invalid="ignore"):  # 0 / 0 where a draw has no token of a bin
        means = (draws @ sums.T) / (draws @ counts.T)  # (resamples, n_bins)
        middle = sums.sum(axis=1) / counts.sum(axis=1)
    result = []
    for number in range(n_bins):
        drawn = means[:, number][~np.isnan(means[:, number])]
        low = high = math.nan
        documents = int(np.count_nonzero(counts[number]))
        if documents >= LEAST_DOCUMENTS:
            tail = _tail(documents)
            low, high = np.quantile(drawn, [tail, 1 - tail])
        result.append(Estimate(mean=float(middle[number]), low=float(low), high=float(high)))
    return result


def _tail(documents: int) -> float:
    """The share of the draws to leave out on each side."""
    expanded = math.sqrt(documents / (documents - 1)) * _t_975(documents - 1)
    return NormalDist().cdf(-expanded)


def _t_975(freedom: int) -> float:
    """The two-sided 95% point of Student's t, by degrees of freedom; to 0.002."""
    if freedom <= len(_T_975):
        return _T_975[freedom - 1]
    z, n = _Z_975, freedom  # the expansion of Cornish and Fisher
    return z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)


@lru_cache(maxsize=1)  # drawing takes longer than all else, and rows of a table share their draws
def _draws(n_documents: int, resamples: int, seed: int) -> np.ndarray:
    """How often each draw has each document: (resamples, n_documents), float64 to be fast."""
    chances = np.full(n_documents, 1 / n_documents)
    draws = np.random.default_rng(seed).multinomial(n_documents, chances, size=resamples)
    return draws.astype(np.float64)


def seed_half_width(a: list[float], b: list[float]) -> float | None:
    """Half the 95% interval of mean(b) - mean(a) over independent seeds, nats.

    Welch's standard error with the degrees of freedom of the smaller sample, the cautious choice.
    None where a sample has a single seed.
    """
    smaller = min(len(a), len(b))
    if smaller < 2:
        return None
    error = math.sqrt(np.var(a, ddof=1) / len(a) + np.var(b, ddof=1) / len(b))
    return _t_975(smaller - 1) * error


def paired_half_width(differences: list[float]) -> float | None:
    """Half the 95% interval of the mean difference over pairs of seeds, nats; None for one pair.

    Student's t. What both runs of a pair have in common, such as the weights that they start with,
    does not widen it.
    """
    n = len(differences)
    if n < 2:
        return None
    return _t_975(n - 1) * float(np.std(differences, ddof=1)) / math.sqrt(n)


def widen(document: Estimate, seeds: float | None) -> Estimate:
    """The interval of a difference that also counts the seeds, whose errors are independent."""
    if seeds is None:
        return document
    return Estimate(
        mean=document.mean,
        low=document.mean - math.hypot(document.mean - document.low, seeds),
        high=document.mean + math.hypot(document.high - document.mean, seeds),
    )
