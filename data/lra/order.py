"""The order in which examples are trained on: a pure function of a key and of sample numbers."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from data.sampler import Permutation

_CHANGES = 8
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
        """(B,) random numbers in [0, 8), by which each sample's image is turned and mirrored."""
        groups, places = np.divmod(samples, _GROUP)
        changes = np.empty_like(samples)
        for group in np.unique(groups).tolist():
            here = groups == group
            drawn = np.random.default_rng([*self._key, group]).integers(_CHANGES, size=_GROUP)
            changes[here] = drawn[places[here]]
        return changes
