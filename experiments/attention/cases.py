"""Problems of experiments.attention: attention cases, and tensors for them.

Letters in shapes: B batch, T tokens, H heads, D head_dim.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from kernels.mask.block_mask import BlockSparseMask
from kernels.mask.patterns import butterfly, sliding_window

DROPOUT_SEED = 1

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class UnsupportedError(Exception):
    """Raised if a contender cannot run a case here; the message has the reason."""


@dataclass(frozen=True)
class Sparsity:
    """A block-sparse mask. `reach` is n_factors of a butterfly (None: all), or a window's width.

    "all" hides nothing. "all but one" hides the first block of keys from the last block of queries.
    """

    pattern: Literal["butterfly", "window", "all", "all but one"]
    reach: int | None = None
    block_size: int = 128

    def mask(self, seq_len: int, device: torch.device | str = "cpu") -> BlockSparseMask:
        """Build the mask for seq_len tokens."""
        n_blocks = -(-seq_len // self.block_size)
        if self.pattern == "butterfly":
            layout = butterfly(n_blocks, n_factors=self.reach, device=device)
        elif self.pattern.startswith("all"):
            layout = torch.ones(n_blocks, n_blocks, dtype=torch.bool, device=device)
            layout[-1, 0] = self.pattern == "all"
        else:
            layout = sliding_window(n_blocks, self.reach or 1, device=device)
        return BlockSparseMask(layout, self.block_size)

    def __str__(self) -> str:
        return self.pattern if self.reach is None else f"{self.pattern} {self.reach}"


@dataclass(frozen=True)
class Case:
    """One attention problem.

    If `padded`, each sequence has T - 20 to T keys, as in the paper. `document` is the length of
    packed documents, tokens; None: each sequence is one document.
    """

    batch: int
    seq_len: int
    n_head: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    causal: bool = False
    dropout_p: float = 0.0
    padded: bool = False
    document: int | None = None
    sparsity: Sparsity | None = None

    @cached_property
    def density(self) -> float:
        """Share of the pairs of query and key that the block-sparse mask keeps."""
        if self.sparsity is None:
            return 1.0
        mask = self.sparsity.mask(self.seq_len)
        return mask.density(self.seq_len, self.seq_len, causal=self.causal)

    @property
    def forward_flops(self) -> float:
        """4 B H T^2 D, half of it if causal, times the density. The backward has 2.5 times this."""
        full = 4 * self.batch * self.n_head * self.seq_len**2 * self.head_dim
        return full * (0.5 if self.causal else 1.0) * self.density

    def kv_lengths(self, device: torch.device | str) -> Tensor:
        """(B,) int32, number of keys of each sequence; T without padding."""
        shortest = max(1, self.seq_len - 20) if self.padded else self.seq_len
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(shortest, self.seq_len + 1, (self.batch,), generator=generator)
        return lengths.int().to(device)

    def describe(self) -> dict[str, Any]:
        """Describe the case as entries of a result's row."""
        return {
            **asdict(self),
            "dtype": str(self.dtype).removeprefix("torch."),
            "mask": str(self.sparsity or "dense"),
            "density": self.density,
        }


class Tensors(NamedTuple):
    """Inputs of a contender, (B, T, H, D) each; q, k and v require gradients."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


def make_tensors(case: Case, device: torch.device | str = "cuda") -> Tensors:
    """Draw normal random tensors on the device: the CPU would take a minute for 64K tokens."""
    generator = torch.Generator(device=device).manual_seed(0)
    shape = (case.batch, case.seq_len, case.n_head, case.head_dim)
    q, k, v, dout = (
        torch.randn(shape, generator=generator, device=device, dtype=case.dtype) for _ in range(4)
    )
    return Tensors(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout)
