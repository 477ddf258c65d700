"""Weights in the dtype of matrix products, cast once a step for all that use them.

Weights are in fp32 and products in less. Within `KeptCasts.on`, what one operator has cast the next
one finds, in the backward pass and in every micro-batch of a step. An optimizer may write the casts
of the weights that it changes: then nothing is cast any more.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

_STALE = -1


@dataclass
class _Kept:
    weight: Tensor  # held, so that nothing else comes to lie where it does
    cast: Tensor
    version: int  # of the weight, as PyTorch counts changes, that was cast
    is_followed: bool = False  # whether who changes the weight writes the cast, too

    @property
    def is_valid(self) -> bool:
        return self.version == self.weight._version

    def renew(self) -> None:
        self.cast.copy_(self.weight.detach())
        self.version = self.weight._version


class KeptCasts:
    """Casts of a model's weights, kept for a step or for as long as an optimizer follows.

    They stay where they are, so a step can be captured in a CUDA graph: it casts again what nobody
    follows, and for the others it need not.
    """

    _on: "KeptCasts | None" = None  # for all threads: the backward pass has one of its own

    def __init__(self) -> None:
        self._kept: dict[int, _Kept] = {}

    @contextmanager
    def on(self) -> Iterator[None]:
        """Have `cast_weight` keep its casts here, for one step."""
        before, KeptCasts._on = KeptCasts._on, self
        try:
            for kept in self._kept.values():
                if kept.is_followed and not kept.is_valid:
                    kept.renew()  # someone else has changed it, of which a graph would not know
            yield
        finally:
            for kept in self._kept.values():
                if not kept.is_followed:
                    kept.version = _STALE
            KeptCasts._on = before

    def of(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """The cast of a weight: what is kept, renewed if it is not valid, or else a new one."""
        kept = self._kept.get(weight.data_ptr())
        if kept is None or (kept.cast.dtype, kept.cast.shape) != (dtype, weight.shape):
            cast = _cast(weight, dtype)
            if weight.is_leaf and weight.requires_grad:  # a parameter, of which there are few
                self._kept[weight.data_ptr()] = _Kept(weight, cast, weight._version)
            return cast
        if not kept.is_valid:
            kept.renew()
        return kept.cast

    def find(self, weight: Tensor) -> Tensor | None:
        """The cast of a weight, if it is kept, for an optimizer to write."""
        kept = self._kept.get(weight.data_ptr())
        return None if kept is None else kept.cast

    def follow(self, weights: Iterable[Tensor]) -> None:
        """These have changed, and their casts with them, as they will from now on."""
        for weight in weights:
            kept = self._kept[weight.data_ptr()]
            kept.version, kept.is_followed = weight._version, True


def kept_casts() -> KeptCasts | None:
    """Those that are on."""
    return KeptCasts._on


def cast_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A weight in `dtype`, contiguous, to read only: itself if that is what it is."""
    if weight.dtype == dtype:
        return weight.contiguous()
    casts = kept_casts()
    return _cast(weight, dtype) if casts is None else casts.of(weight, dtype)


def _cast(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return weight.detach().to(dtype, memory_format=torch.contiguous_format)
