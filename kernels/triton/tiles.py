"""Tile sizes by kernel, GPU and padded head dimension: the tables, and how to read them.

`hopper` was measured on an H100; `portable` fits the 99 KiB of shared memory that the smallest
Ampere and Ada GPUs have. A name with a comma holds exceptions, which tuning.py chooses:

    short   where a query sees at most SHORT keys, on average: there starting and ending a program
            takes a good part of its time, and more programs side by side hide it
    causal  where small tiles leave out more of what a causal mask hides
    small   where the walk is short (a mask) or registers scarce (a cap, dropout, grouped heads)
    whole   where a mask leaves whole blocks only: one loop, with registers to spare
"""

import functools
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Tiles:
    """What one launch is compiled for.

    Attributes:
        block_m, block_n: queries and keys of a tile.
        num_warps: of a program.
        num_stages: of the pipeline that loads tiles ahead of their use.
        max_registers: of a thread, where fewer than the compiler would take let more programs run
            side by side.
        block_n_masked: keys of a tile in the forward kernel's second loop, over tiles cut by a
            mask, where smaller ones leave more out; block_n if not given.
        block_d: columns of a tile; not in the tables, which are by head dimension.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    block_n_masked: int = 0
    block_d: int = 0

    @functools.cached_property
    def launch(self) -> dict[str, Any]:
        """The keyword arguments of a launch that these are."""
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "BLOCK_D": self.block_d,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "maxnreg": self.max_registers,
            "enable_fp_fusion": True,
        }


SHORT = 640  # keys

FORWARD = {
    "hopper": {
        16: Tiles(128, 64, 4, 3),
        32: Tiles(128, 64, 4, 3),
        64: Tiles(64, 128, 4, 2, max_registers=168, block_n_masked=64),
        128: Tiles(128, 64, 4, 2),
        256: Tiles(128, 64, 8, 2),
    },
    "hopper, short": {64: Tiles(64, 64, 4, 2, max_registers=96)},
    "hopper, causal": {128: Tiles(64, 64, 4, 3)},
    "portable": {
        16: Tiles(128, 64, 4, 3),
        32: Tiles(128, 64, 4, 3),
        64: Tiles(128, 64, 4, 3),
        128: Tiles(64, 64, 4, 2),
        256: Tiles(64, 32, 4, 2),
    },
}
BACKWARD_DKDV = {
    "hopper": {
        16: Tiles(32, 64, 4, 3),
        32: Tiles(32, 64, 4, 3),
        64: Tiles(128, 64, 4, 2),
        128: Tiles(64, 64, 4, 2),
        256: Tiles(32, 64, 8, 2),
    },
    "hopper, small": {64: Tiles(64, 64, 4, 2, max_registers=168)},
    "hopper, whole": {64: Tiles(64, 64, 4, 3, max_registers=168)},
    "portable": {
        16: Tiles(32, 64, 4, 2),
        32: Tiles(32, 64, 4, 2),
        64: Tiles(64, 32, 4, 2),
        128: Tiles(32, 64, 8, 2),
        256: Tiles(16, 32, 8, 1),
    },
}
BACKWARD_DQ = {
    "hopper": {
        16: Tiles(128, 64, 4, 3),
        32: Tiles(128, 64, 4, 3),
        64: Tiles(64, 64, 4, 3),
        128: Tiles(128, 64, 8, 3),
        256: Tiles(64, 32, 4, 2),
    },
    "hopper, short": {128: Tiles(128, 32, 8, 3, max_registers=128)},
    "portable": {
        16: Tiles(64, 64, 4, 2),
        32: Tiles(64, 64, 4, 2),
        64: Tiles(64, 32, 4, 2),
        128: Tiles(64, 32, 4, 2),
        256: Tiles(32, 16, 4, 2),
    },
}
# fp32 operands are twice as large and run without the 16-bit matrix units.
FP32 = {
    16: Tiles(64, 32, 4, 2),
    32: Tiles(64, 32, 4, 2),
    64: Tiles(32, 32, 4, 2),
    128: Tiles(32, 16, 4, 2),
    256: Tiles(16, 16, 4, 1),
}

MAX_BLOCK = 128  # no tile in the tables has more rows; kernels/checks.py relies on it

TABLES = {"forward": FORWARD, "backward_dq": BACKWARD_DQ, "backward_dkdv": BACKWARD_DKDV}
