"""Weighted mixture of several corpora in training batches.

The corpus of a sample, and its number in that corpus, are pure functions of the seed and the sample
number, as in `data.sampler`. Samples come in rounds of `ROUND`. In each round, every corpus gets
its share at new random places. The sample numbers of a corpus have no gaps, so each of its epochs
sees all of its text once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from data.sampler import Permutation
from data.text.batches import Batch, TrainBatches

ROUND = 4096  # samples per round; the share of each corpus is a whole number of them


@dataclass(eq=False)
class Mixture:
    """Map from sample numbers to corpora and their own sample numbers.

    Raises:
        ValueError: A weight is not positive, or is too small for even one sample per round.
    """

    weights: Sequence[float]
    """Relative weights of the corpora."""
    seed: int

    def __post_init__(self) -> None:
        total = sum(self.weights)
        for weight in self.weights:
            if not (weight > 0 and weight < float("inf")):
                raise ValueError(f"weight={weight} of a corpus must be a finite number above 0.")
            if weight / total < 1 / ROUND:
                raise ValueError(
                    f"weight={weight} must be at least 1/{ROUND} of {total:g}, the sum of all "
                    "weights: raise it, or leave the corpus out."
                )
        self.quotas = _quotas([weight / total for weight in self.weights])
        """Samples of each corpus per round."""
        self._ends = np.cumsum(self.quotas)

    def assign(
        self, numbers: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Corpus of each sample, and its number in that corpus: int64, shaped like `numbers`."""
        rounds, offsets = np.divmod(numbers, ROUND)
        shuffled = np.empty_like(offsets)
        for number in np.unique(rounds).tolist():
            mask = rounds == number
            shuffled[mask] = Permutation(ROUND, (self.seed, number, 2))(offsets[mask])
        # Each corpus owns a range of a shuffled round, so its own numbers have no gaps.
        corpus = np.searchsorted(self._ends, shuffled, side="right")
        quotas = np.array(self.quotas)[corpus]
        return corpus, rounds * quotas + shuffled - (self._ends[corpus] - quotas)


def _quotas(shares: Sequence[float]) -> list[int]:
    """Round shares of ROUND to positive integers with sum ROUND, each within 1 of its share."""
    exact = [share * ROUND for share in shares]
    quotas = [max(1, int(value)) for value in exact]
    rest = sorted(range(len(exact)), key=lambda i: quotas[i] - exact[i])
    for i in range(ROUND - sum(quotas)):
        quotas[rest[i]] += 1
    return quotas


@dataclass(eq=False)
class MixedBatches:
    """Training batches from several corpora, in random access like `TrainBatches`."""

    corpora: Sequence[TrainBatches]
    """Batches of each corpus, with equal settings."""
    mixture: Mixture

    def batch(self, first_sample: int, batch_size: int) -> Batch:
        """Read samples [first_sample, first_sample + batch_size) as contiguous tensors."""
        return self.samples(np.arange(first_sample, first_sample + batch_size))

    def samples(self, numbers: npt.NDArray[np.int64]) -> Batch:
        """Read samples by number, int64 (B,), as contiguous tensors."""
        consecutive = self.corpora[0].consecutive_windows
        groups, parts = np.divmod(numbers, consecutive)
        corpus, group = self.mixture.assign(groups)
        own = group * consecutive + parts
        batches = {
            index: (corpus == index, self.corpora[index].samples(own[corpus == index]))
            for index in np.unique(corpus).tolist()
        }

        def merge(name: str) -> torch.Tensor:
            parts = {index: getattr(batch, name) for index, (_, batch) in batches.items()}
            first = next(iter(parts.values()))
            out = first.new_empty(len(numbers), *first.shape[1:])
            for index, (rows, _) in batches.items():
                out[torch.from_numpy(rows)] = parts[index]
            return out

        masked = self.corpora[0].document_mask
        doc_start = merge("doc_start") if masked else None
        return Batch(merge("tokens"), merge("targets"), doc_start)
