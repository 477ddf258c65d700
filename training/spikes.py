"""Losses that stand out from those before them."""

from collections import deque
from collections.abc import Iterable
from statistics import median

_WINDOW, _ENOUGH = 50, 20
_SIGMA = 1.4826
"""A normal distribution's standard deviation over its median absolute deviation."""
HIGH = 8.0
"""Robust z-score from which a loss is called a spike: noise of a falling loss stays below it."""


class Spikes:
    """How far each loss lies above the last 50, in a unit that outliers among those do not stretch.

    The robust z-score: distance from the median, over the median of such distances, scaled so that
    it is the usual z-score where losses are normally distributed.
    """

    def __init__(self, losses: Iterable[float] = ()) -> None:
        """`losses` came before, oldest first."""
        self._losses = deque(losses, maxlen=_WINDOW)

    def z_score(self, loss: float) -> float | None:
        """That of one more loss; None for the first 20, and where all before it are the same."""
        before = [*self._losses]
        self._losses.append(loss)
        if len(before) < _ENOUGH:
            return None
        middle = median(before)
        spread = _SIGMA * median(abs(other - middle) for other in before)
        return (loss - middle) / spread if spread else None
