"""Tile sizes and registers of the Hopper kernels, measured on an H100: docs/hopper.md."""

import functools
from dataclasses import dataclass
from typing import Any

KEYS = 128  # of a tile
SHORT = 2048  # queries
SECTION_BYTES = 8 * 2**20  # of keys and values that are worked on together: L2 has 50 MB


@dataclass(frozen=True)
class Tiles:
    """What the forward kernel is compiled for.

    Attributes:
        block_d: columns of a tile, D rounded up to 64 or 128.
        groups: of consumers, with 64 queries each.
        stages: of the ring of keys and values; q_stages: row tiles whose queries lie in memory.
        consumer_registers: of a thread in all consumer groups but the first, which gets what is
            left of max_registers a thread when the roles have shared them out.
    """

    block_d: int
    groups: int
    stages: int
    q_stages: int
    consumer_registers: int
    max_registers: int
    block_n: int = KEYS
    producer_registers: int = 24

    @functools.cached_property
    def launch(self) -> dict[str, Any]:
        """The keyword arguments of a compilation that these are."""
        return {
            "GROUPS": self.groups,
            "STAGES": self.stages,
            "Q_STAGES": self.q_stages,
            "CONSUMER_REGISTERS": self.consumer_registers,
            "PRODUCER_REGISTERS": self.producer_registers,
            "num_warps": 4,
            "maxnreg": self.max_registers,
        }


TWO_GROUPS = Tiles(64, 2, 4, 2, consumer_registers=240, max_registers=168)
THREE_GROUPS = Tiles(64, 3, 4, 2, consumer_registers=160, max_registers=128)
WIDE = Tiles(128, 2, 2, 2, consumer_registers=240, max_registers=168)


def forward_tiles(head_dim: int, seq_q: int, cut: int, causal: bool) -> Tiles:
    """Tiles for a call; `cut` is that of `kernels.hopper.fwd.cut_tiles`.

    At 64 columns three groups keep the tensor cores busiest. But a row tile of 192 queries wastes
    more under a short causal mask, and masks beside the diagonal want more registers than it has.
    """
    if head_dim > 64:
        return WIDE
    if causal:
        return THREE_GROUPS if cut == 1 and seq_q > SHORT else TWO_GROUPS
    return THREE_GROUPS if cut == 0 else TWO_GROUPS
