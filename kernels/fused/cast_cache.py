"""Cache of weights that are cast to the dtype of matrix products, once per training step.

Weights are fp32, matrix products run in bf16 or fp16. While a `CastCache` is active, all operators
share one cast of each weight: in both passes, and in every micro-batch of a step. An optimizer may
write the casts together with the weights that it updates, so that no cast is needed later.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

_STALE = -1


@dataclass
class _Entry:
    weight: Tensor  # held, so that its address is not reused while the entry exists
    cast: Tensor
    version: int  # PyTorch's modification counter of the weight when it was cast
    optimizer_writes: bool = False  # the optimizer writes the cast when it updates the weight

    @property
    def is_current(self) -> bool:
        return self.version == self.weight._version

    def refresh(self) -> None:
        self.cast.copy_(self.weight.detach())
        self.version = self.weight._version


class CastCache:
    """Casts of a model's weights, valid for one step, or longer if an optimizer writes them.

    A cast keeps its address, so a step can be captured in a CUDA graph. The graph casts the weights
    again, except those whose casts the optimizer writes.
    """

    # Not per thread, because autograd runs the backward pass in a thread of its own.
    _active: "CastCache | None" = None

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}  # by the weight's address

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Make `cast_weight` use this cache, for one step."""
        previous, CastCache._active = CastCache._active, self
        try:
            # A captured step reads these casts without a check, so catch up with weights that
            # somebody other than the optimizer has changed, for example by loading a checkpoint.
            for entry in self._entries.values():
                if entry.optimizer_writes and not entry.is_current:
                    entry.refresh()
            yield
        finally:
            # The next step must cast these weights again, and a captured step must contain the
            # cast: replays change the weights, but not their version counters.
            for entry in self._entries.values():
                if not entry.optimizer_writes:
                    entry.version = _STALE
            CastCache._active = previous

    def get(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Cast of a weight, computed again only if it is missing or stale."""
        entry = self._entries.get(weight.data_ptr())
        if entry is None or (entry.cast.dtype, entry.cast.shape) != (dtype, weight.shape):
            cast = _cast(weight, dtype)
            # Cache parameters only: the address of a temporary tensor is soon that of another
            # tensor.
            if weight.is_leaf and weight.requires_grad:
                self._entries[weight.data_ptr()] = _Entry(weight, cast, weight._version)
            return cast
        if not entry.is_current:
            entry.refresh()
        return entry.cast

    def find(self, weight: Tensor) -> Tensor | None:
        """Cached cast of a weight for an optimizer to write, or None."""
        entry = self._entries.get(weight.data_ptr())
        return None if entry is None else entry.cast

    def mark_written(self, weights: Iterable[Tensor]) -> None:
        """Record that the optimizer updated these weights and their casts, as it always will."""
        for weight in weights:
            entry = self._entries[weight.data_ptr()]
            entry.version, entry.optimizer_writes = weight._version, True


def active_cast_cache() -> CastCache | None:
    """Active cast cache, or None."""
    return CastCache._active


def find_casts(weights: Iterable[Tensor]) -> list[Tensor | None]:
    """Casts of weights in the active cache, for an optimizer to write; None for each without."""
    cache = CastCache._active
    return [None if cache is None else cache.find(weight) for weight in weights]


def mark_written(weights: Iterable[Tensor], casts: Iterable[Tensor | None]) -> None:
    """Record that the optimizer updated these weights and these casts from `find_casts`."""
    cache = CastCache._active
    if cache is not None:
        pairs = zip(weights, casts, strict=True)
        cache.mark_written(weight for weight, cast in pairs if cast is not None)


def cast_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Contiguous, read-only weight in `dtype`; the weight itself where nothing needs to change."""
    if weight.dtype == dtype:
        return weight.contiguous()
    cache = active_cast_cache()
    return _cast(weight, dtype) if cache is None else cache.get(weight, dtype)


def _cast(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return weight.detach().to(dtype, memory_format=torch.contiguous_format)
