"""Training batches from several corpora, by weight.

Which corpus a sample is of, and which of that corpus's samples, are pure functions of the seed and
its number, as in `data.sampler`: samples come in rounds of `ROUND`, in each of which every corpus
has its share of places, drawn anew. A corpus's own samples follow each other without a gap, so that
each of its epochs sees all of its text once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from data.sampler import Permutation
from data.text.batches import Batch, TrainBatches

ROUND = 4096  # samples in which the shares are exact: whole numbers of these


@dataclass(eq=False)
class Mixture:
    """Which corpus a sample is of, and which of its samples.

    Raises:
        ValueError: A weight is not positive, or so small that a corpus would have no sample.
    """

    weights: Sequence[float]
    """Of the corpora, in any unit."""
    seed: int

    def __post_init__(self) -> None:
        total = sum(self.weights)
        for weight in self.weights:
            if not (weight > 0 and weight < float("inf")):
                raise ValueError(f"weight={weight} of a corpus must be a finite number above 0.")
            if weight / total < 1 / ROUND:
                raise ValueError(
                    f"weight={weight} is less than one in {ROUND} of {total:g}, the sum of all: "
                    "raise it, or leave the corpus out."
                )
        self.quotas = _quotas([weight / total for weight in self.weights])
        """Samples of each corpus in a round."""
        self._ends = np.cumsum(self.quotas)

    def of(
        self, numbers: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The corpus of each sample, and its number there: int64 of the shape of `numbers`."""
        rounds, places = np.divmod(numbers, ROUND)
        drawn = np.empty_like(places)
        for number in np.unique(rounds).tolist():
            here = rounds == number
            drawn[here] = Permutation(ROUND, (self.seed, number, 2))(places[here])
        corpus = np.searchsorted(self._ends, drawn, side="right")
        quotas = np.array(self.quotas)[corpus]
        return corpus, rounds * quotas + drawn - (self._ends[corpus] - quotas)


def _quotas(shares: Sequence[float]) -> list[int]:
    """Whole numbers that add up to ROUND, each within one of its share, and at least 1."""
    exact = [share * ROUND for share in shares]
    quotas = [max(1, int(value)) for value in exact]
    rest = sorted(range(len(exact)), key=lambda i: quotas[i] - exact[i])
    for i in range(ROUND - sum(quotas)):
        quotas[rest[i]] += 1
    return quotas


@dataclass(eq=False)
class MixedBatches:
    """`TrainBatches` of several corpora: any batch at any time, the same on any number of GPUs."""

    corpora: Sequence[TrainBatches]
    """Alike but for their streams."""
    mixture: Mixture

    def batch(self, first_sample: int, batch_size: int) -> Batch:
        """Samples [first_sample, first_sample + batch_size) as contiguous tensors."""
        consecutive = self.corpora[0].consecutive_windows
        groups, parts = np.divmod(np.arange(first_sample, first_sample + batch_size), consecutive)
        corpus, group = self.mixture.of(groups)
        numbers = group * consecutive + parts
        found = {
            index: (corpus == index, self.corpora[index].samples(numbers[corpus == index]))
            for index in np.unique(corpus).tolist()
        }

        def together(name: str) -> torch.Tensor:
            parts = {index: getattr(batch, name) for index, (_, batch) in found.items()}
            first = next(iter(parts.values()))
            out = first.new_empty(batch_size, *first.shape[1:])
            for index, (rows, _) in found.items():
                out[torch.from_numpy(rows)] = parts[index]
            return out

        masked = self.corpora[0].document_mask
        doc_start = together("doc_start") if masked else None
        return Batch(together("tokens"), together("targets"), doc_start)
