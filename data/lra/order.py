"""The order in which examples are trained on: a pure function of a key and of sample numbers."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from data.lra.pixels import DIHEDRAL
from data.sampler import Permutation

_GROUP = 4096  # samples whose changes are drawn at once


class ExampleSampler:
    """Visits all examples of a set in a new random order every epoch."""

    def __init__(self, size: int, key: Sequence[int]) -> None:
        """Choose the order.

        Args:
            size: of the set, at least 1.
            key: non-negative integers; every key gives its own order.
        """
        self._size = size
        self._key = list(key)

    def examples(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Which example each sample is.

        Args:
            samples: (B,) integers >= 0, counted on over all epochs.

        Returns:
            (B,) int64 in [0, size).
        """
        epochs, indices = np.divmod(samples, self._size)
        examples = np.empty_like(indices)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            examples[here] = Permutation(self._size, (*self._key, epoch))(indices[here])
        return examples

    def changes(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """(B,) random codes of `data.lra.pixels.dihedral`, one for each sample."""
        return self._draw(samples, DIHEDRAL)

    def shifts(self, samples: npt.NDArray[np.int64], most: int) -> npt.NDArray[np.int64]:
        """(B,) random codes of `data.lra.pixels.shifted`, one for each sample."""
        return self._draw(samples, (2 * most + 1) ** 2, 1)

    def _draw(
        self, samples: npt.NDArray[np.int64], below: int, *stream: int
    ) -> npt.NDArray[np.int64]:
        """(B,) random numbers in [0, below), the same for the same sample."""
        groups, places = np.divmod(samples, _GROUP)
        found = np.empty_like(samples)
        for group in np.unique(groups).tolist():
            here = groups == group
            drawn = np.random.default_rng([*self._key, group, *stream]).integers(below, size=_GROUP)
            found[here] = drawn[places[here]]
        return found
