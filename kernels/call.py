"""A call of attention, as its implementations are asked about it and given it.

Each implementation has a function `obstacle(call)` beside it: why it cannot serve a call, or None.
"""

import math
from collections.abc import Collection
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from .mask.block_mask import BlockSparseMask


class AttentionArguments(TypedDict, total=False):
    """The options of `kernels.flash_attention` that change its result."""

    causal: bool
    softmax_scale: float | None
    window_size: int | None
    mask: BlockSparseMask | None
    doc_start: Tensor | None
    kv_lengths: Tensor | None
    sinks: Tensor | None
    softcap: float | None
    dropout_p: float
    dropout_seed: int | Tensor | None


class AttentionCall(NamedTuple):
    """A checked call of `kernels.flash_attention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    arguments: AttentionArguments
    """All of them; without dropout there is no seed."""
    return_lse: bool
    deterministic: bool
    first_query: int = 0
    """The number that dropout has for the first query: a multiple of 16."""

    @property
    def softmax_scale(self) -> float:
        """Factor on the scores: that of the arguments, or 1 / sqrt(D)."""
        return self.arguments.get("softmax_scale") or 1.0 / math.sqrt(self.q.shape[-1])

    def lacks(self, served: Collection[str]) -> str | None:
        """Why an implementation of some options alone cannot serve the call, None if it can.

        Whoever does not name an option refuses it, so that a new one is ignored by nobody.

        Args:
            served: options that it serves, by their names in `AttentionArguments`.
        """
        for name, value in self.arguments.items():
            # of a mask or tensor its presence alone: PyTorch 2.11 cannot compile bool(mask)
            used = bool(value) if isinstance(value, (int, float)) else value is not None
            if used and name not in served and name != "softmax_scale":
                return f"it does not support {name}"
        return None

    def seeded(self) -> AttentionArguments:
        """The arguments with a seed on the device of q where there is dropout: (1,) int64.

        Without one it is drawn from PyTorch's generator of the device, which activation
        checkpointing restores before it computes a call again. The CPU does not wait for the GPU.
        """
        p, seed = self.arguments.get("dropout_p"), self.arguments.get("dropout_seed")
        if not p or isinstance(seed, Tensor):
            return self.arguments
        on_device = {"dtype": torch.int64, "device": self.q.device}
        if seed is None:
            seed = torch.randint(2**63 - 1, (1,), **on_device)
        else:
            seed = torch.full((1,), seed, **on_device)  # a copy from the host would wait
        return {**self.arguments, "dropout_seed": seed}
