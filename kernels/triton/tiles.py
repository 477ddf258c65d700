"""Tables of tile sizes, by kernel, GPU and padded head dimension.

`hopper` was measured on an H100; `portable` fits the 99 KiB of shared memory of the smallest Ampere
and Ada GPUs. A table with a comma in its name holds exceptions, which tuning.py chooses:

    short   a query sees at most SHORT keys, on average. Starting and ending a program then takes a
            large part of its time, which more programs per SM hide
    causal  smaller tiles skip more of the keys that a causal mask hides
    small   few tiles per program (a mask) or scarce registers (a cap, dropout, grouped heads)
    whole   a mask leaves only whole blocks: one loop, with registers to spare
"""

import functools
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Tiles:
    """Tile sizes and compile options of one launch."""

    block_m: int  # queries of a tile
    block_n: int  # keys of a tile
    num_warps: int  # of a program
    num_stages: int  # of the pipeline that loads tiles ahead of their use
    # Limit per thread, below the compiler's choice so that more programs fit on an SM; or None.
    max_registers: int | None = None
    # block_n in the forward kernel's masked loop, where smaller tiles skip more hidden keys; or 0.
    block_n_masked: int = 0
    block_d: int = 0  # columns of a tile; not in the tables, which are by head dimension

    @functools.cached_property
    def launch(self) -> dict[str, Any]:
        """Keyword arguments of a launch with these tiles."""
        return {
            "BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "BLOCK_D": self.block_d,
            "num_warps": self.num_warps, "num_stages": self.num_stages,
            "maxnreg": self.max_registers, "enable_fp_fusion": True,
        }  # fmt: skip


SHORT = 640  # keys

# fmt: off
FORWARD = {
    "hopper": {16: Tiles(128, 64, 4, 3), 32: Tiles(128, 64, 4, 3),
        64: Tiles(64, 128, 4, 2, max_registers=168, block_n_masked=64), 128: Tiles(128, 64, 4, 2),
        256: Tiles(128, 64, 8, 2)},
    "hopper, short": {64: Tiles(64, 64, 4, 2, max_registers=96)},
    "hopper, causal": {128: Tiles(64, 64, 4, 3)},
    "portable": {16: Tiles(128, 64, 4, 3), 32: Tiles(128, 64, 4, 3), 64: Tiles(128, 64, 4, 3),
        128: Tiles(64, 64, 4, 2), 256: Tiles(64, 32, 4, 2)},
}
BACKWARD_DKDV = {
    "hopper": {16: Tiles(32, 64, 4, 3), 32: Tiles(32, 64, 4, 3), 64: Tiles(128, 64, 4, 2),
        128: Tiles(64, 64, 4, 2), 256: Tiles(32, 64, 8, 2)},
    "hopper, small": {64: Tiles(64, 64, 4, 2, max_registers=168)},
    "hopper, whole": {64: Tiles(64, 64, 4, 3, max_registers=168)},
    "portable": {16: Tiles(32, 64, 4, 2), 32: Tiles(32, 64, 4, 2), 64: Tiles(64, 32, 4, 2),
        128: Tiles(32, 64, 8, 2), 256: Tiles(16, 32, 8, 1)},
}
BACKWARD_DQ = {
    "hopper": {16: Tiles(128, 64, 4, 3), 32: Tiles(128, 64, 4, 3), 64: Tiles(64, 64, 4, 3),
        128: Tiles(128, 64, 8, 3), 256: Tiles(64, 32, 4, 2)},
    "hopper, short": {128: Tiles(128, 32, 8, 3, max_registers=128)},
    "portable": {16: Tiles(64, 64, 4, 2), 32: Tiles(64, 64, 4, 2), 64: Tiles(64, 32, 4, 2),
        128: Tiles(64, 32, 4, 2), 256: Tiles(32, 16, 4, 2)},
}
# fp32 operands take twice the shared memory, and their products are slower: smaller tiles.
FP32 = {
    16: Tiles(64, 32, 4, 2), 32: Tiles(64, 32, 4, 2), 64: Tiles(32, 32, 4, 2),
    128: Tiles(32, 16, 4, 2), 256: Tiles(16, 16, 4, 1),
}
# fmt: on

# No tile in the tables has more rows. kernels/checks.py relies on it: offsets within a tile are
# int32.
MAX_BLOCK = 128

TABLES = {"forward": FORWARD, "backward_dq": BACKWARD_DQ, "backward_dkdv": BACKWARD_DKDV}
