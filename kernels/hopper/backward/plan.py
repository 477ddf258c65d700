"""Plans of the backward kernel: tiles, roles, registers; measured on an H100 (docs/hopper.md)."""

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import triton

from ...options import Features

KEYS = 64  # of a group
QUERIES = 64  # of a row tile: what a group multiplies its keys with at a time
BLOCK = 2 * KEYS  # of a program of two groups, and as many queries: what it visits at once
DQ_QUERIES_AHEAD = 512  # for whose dq semaphores a program waits ahead
SECTION_BYTES = 32 * 2**20  # of queries, dout and sums of dq that are in use together
MOST_HEADS = 16  # that are processed together
LONG_GROUP = 4  # query heads of a key-value head, from which on key tiles take long
# Under a block-sparse mask a row tile is read again much later, so that less is in the cache.
SPARSE_SECTION_BYTES = 16 * 2**20


@dataclass(frozen=True)
class BackwardPlan:
    """Tiles, roles and features of the backward kernel: one compilation for each that is used."""

    block_d: int  # columns of a tile, D rounded up to 64 or 128
    stages: int  # row tiles of q and dout in shared memory
    ds_stages: int  # of ds
    kv_stages: int  # tiles of keys and values in shared memory
    key_registers: int  # of a thread in the second group of keys; the first gets what is left
    dq_registers: int  # of a thread in the group that makes dq; 0 where the groups of keys make it
    max_registers: int
    groups: int = 2  # of 64 keys each, in a program: one for masks in blocks of 64
    programs: int = 1  # of a multiprocessor
    keys_in_registers: bool = False  # whether a group of keys reads them from there for its scores
    ragged: bool = False  # whether the last key tile has keys that do not exist
    features: Features = field(default_factory=Features)  # what the call asks for

    @property
    def compiler_options(self) -> dict[str, Any]:
        """Options of Triton's compiler. Contraction is set because releases differ in it."""
        return {"num_warps": 4, "maxnreg": self.max_registers, "enable_fp_fusion": True}

    @property
    def worker_warps(self) -> list[int]:
        """Warps of each role but the first group: other groups, the producer and two of dq."""
        return [4] * (self.groups - 1 + self.dq_group) + [1] * 3

    @property
    def worker_registers(self) -> list[int]:
        """Registers of a thread in these roles."""
        keys, dq = [self.key_registers] * (self.groups - 1), [self.dq_registers] * self.dq_group
        return keys + dq + [24] * 3

    @property
    def block(self) -> int:
        """Keys of a program, and how many queries it visits at once."""
        return self.groups * KEYS

    @property
    def dq_group(self) -> bool:
        """Whether a group of its own computes dq; at 128 columns there are no registers for it, and
        with one group of keys it would have little to do."""
        return self.dq_registers > 0

    @property
    def posts_visits(self) -> bool:
        """Whether the acquiring warp posts to the groups whether others add to a block, where they
        lack the registers to compute it. Elsewhere reading it costs up to 6%."""
        return self.has_block_list or self.features.window or self.features.documents

    @property
    def dq_queries(self) -> int:
        """Queries of one dq semaphore: a block, or under a block-sparse mask, where programs are
        more often at the same rows, a row tile. A `dq_group` cannot acquire one that often."""
        return QUERIES if self.has_block_list and not self.dq_group else self.block

    @property
    def dq_stages(self) -> int:
        """How many semaphores ahead a program waits."""
        return DQ_QUERIES_AHEAD // self.dq_queries

    @property
    def has_block_list(self) -> bool:
        """Whether the queries of a key tile come from the list of a block-sparse mask."""
        return self.features.mask_block_size > 0

    @property
    def asks_for_rows(self) -> bool:
        """Whether a group of keys needs the number of its row tile."""
        return self.masks or self.features.dropout

    @property
    def masks(self) -> bool:
        """Whether some row tile hides something."""
        features = self.features
        limited = features.causal or features.window or features.documents or features.lengths
        return limited or features.packed or self.ragged


NARROW = BackwardPlan(64, 4, 2, 2, key_registers=192, dq_registers=104, max_registers=128)
WIDE = BackwardPlan(128, 2, 2, 1, key_registers=240, dq_registers=0, max_registers=168)

# For masks in blocks of 64, by columns: a multiprocessor has two programs, one of which runs under
# the other's beginnings and ends.
ONE_GROUP = {
    64: replace(NARROW, ds_stages=1, key_registers=0, dq_registers=0, groups=1, programs=2),
    128: replace(WIDE, ds_stages=1, key_registers=0, max_registers=128, groups=1, programs=2),
}

# What ptxas of Triton 3.6 finds registers for, 3.9's serialises wgmma for the lack of (C7512).
# Without it most of what 64 columns take is 4 to 12% slower.
KEYS_FIT = tuple(map(int, triton.__version__.split(".")[:2])) <= (3, 6)


@functools.cache  # a call would cost the CPU some microseconds
def backward_plan(head_dim: int, seq_k: int, features: Features) -> BackwardPlan | None:
    """The plan for q (B, T_q, H, D) and k (B, T_k, H_kv, D); None if the kernel does not serve it.

    A sink is in lse already, and asks nothing of the kernel.
    """
    if head_dim > 128:
        return None
    plan = WIDE if head_dim > 64 else replace(NARROW, keys_in_registers=KEYS_FIT)
    if features.mask_block_size == KEYS:
        if head_dim <= 64 and not features.packed:
            return None  # two kernels that add nothing are faster, the portable ones
        plan = ONE_GROUP[plan.block_d]
    # of a sink and of empty rows the kernel need not know, nor whether a list has full blocks
    asked = replace(features, sinks=False, empty_rows=False, unmasked_loop=True, masked_loop=True)
    return replace(plan, ragged=seq_k % plan.block != 0, features=asked)


def heads_together(seq_q: int, group: int, n_heads: int, plan: BackwardPlan) -> int:
    """Number of key-value heads, of `n_heads`, that are processed at a time.

    With fewer heads, programs share more of what they read in the L2 cache; with more, fewer wait
    for each other where key tiles have few queries to visit, or unequal numbers. Grouped heads
    under a causal mask have many, and unequal: few of them are best processed all together.
    """
    head_bytes = seq_q * group * plan.block_d * (2 + 2 + 4)
    if not plan.has_block_list:
        unequal = plan.features.causal and not plan.features.window
        if unequal and group >= LONG_GROUP and n_heads <= MOST_HEADS:
            return n_heads
        return max(1, min(n_heads, MOST_HEADS, SECTION_BYTES // head_bytes))
    uneven = 2 if plan.features.causal else 1
    most = min(MOST_HEADS, uneven * SPARSE_SECTION_BYTES // head_bytes)
    return min(n_heads, max(uneven, most))
