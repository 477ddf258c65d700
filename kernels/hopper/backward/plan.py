"""Plans of the backward kernel: tiles, roles, registers; measured on an H100 (docs/hopper.md)."""

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import triton

from ...options import Features

KEYS = 64  # per group
QUERIES = 64  # per row tile: a group multiplies its keys with these at a time
BLOCK = 2 * KEYS  # keys of a program with two groups, and number of queries that it visits at once
DQ_QUERIES_AHEAD = 512  # a program waits ahead for the dq semaphores of these
SECTION_BYTES = 32 * 2**20  # queries, dout and sums of dq that are in use together
MOST_HEADS = 16  # limit on the heads that are processed together
LONG_GROUP = 4  # from as many query heads per key-value head on, key tiles take long
# Under a block-sparse mask a row tile is read again much later, so less of this stays in the cache.
SPARSE_SECTION_BYTES = 16 * 2**20


@dataclass(frozen=True)
class BackwardPlan:
    """Tiles, roles and features of the backward kernel: each plan in use is compiled once."""

    block_d: int  # columns of a tile, D rounded up to 64 or 128
    stages: int  # row tiles of q and dout in shared memory
    ds_stages: int  # row tiles of ds in shared memory
    kv_stages: int  # tiles of keys and values in shared memory
    key_registers: int  # per thread of the second group of keys; the first gets what is left
    dq_registers: int  # per thread of the dq group; 0 if the groups of keys compute dq
    max_registers: int
    groups: int = 2  # groups of 64 keys per program; one for masks in blocks of 64
    programs: int = 1  # per SM
    keys_in_registers: bool = False  # whether keys are register operands of the scores
    ragged: bool = False  # whether the last key tile extends past the last key
    features: Features = field(default_factory=Features)  # options of the call

    @property
    def compiler_options(self) -> dict[str, Any]:
        """Options of Triton's compiler. FP fusion is set because releases differ in its default."""
        return {"num_warps": 4, "maxnreg": self.max_registers, "enable_fp_fusion": True}

    @property
    def worker_warps(self) -> list[int]:
        """Warps of each role but the first group: other groups, producer, two semaphore warps."""
        return [4] * (self.groups - 1 + self.dq_group) + [1] * 3

    @property
    def worker_registers(self) -> list[int]:
        """Registers per thread of each role in `worker_warps`."""
        keys, dq = [self.key_registers] * (self.groups - 1), [self.dq_registers] * self.dq_group
        return keys + dq + [24] * 3

    @property
    def block(self) -> int:
        """Number of keys of a program, and of queries that it visits at once."""
        return self.groups * KEYS

    @property
    def dq_group(self) -> bool:
        """Whether a separate group computes dq.

        At 128 columns there are no registers for it; with one group of keys it would have little
        to do.
        """
        return self.dq_registers > 0

    @property
    def posts_visits(self) -> bool:
        """Whether the acquiring warp computes for the groups if others add to a block.

        It does so where the groups lack the registers. Elsewhere they compute it themselves, as
        reading it costs up to 6%.
        """
        return self.has_block_list or self.features.window or self.features.documents

    @property
    def dq_queries(self) -> int:
        """Number of queries of one dq semaphore: a block, or under a block-sparse mask a row tile.

        There, programs are more often at the same rows. But a `dq_group` cannot acquire a semaphore
        for each row tile in time.
        """
        return QUERIES if self.has_block_list and not self.dq_group else self.block

    @property
    def dq_stages(self) -> int:
        """Number of semaphores for which a program waits ahead."""
        return DQ_QUERIES_AHEAD // self.dq_queries

    @property
    def has_block_list(self) -> bool:
        """Whether the queries of a key tile come from the list of a block-sparse mask."""
        return self.features.mask_block_size > 0

    @property
    def asks_for_rows(self) -> bool:
        """Whether a group of keys needs the number of its row tile."""
        return self.masks or self.features.dropout or self.features.alibi

    @property
    def masks(self) -> bool:
        """Whether some row tile may hide a key from a query."""
        features = self.features
        limited = features.causal or features.window or features.documents or features.lengths
        return limited or features.packed or self.ragged


NARROW = BackwardPlan(64, 4, 2, 2, key_registers=192, dq_registers=104, max_registers=128)
WIDE = BackwardPlan(128, 2, 2, 1, key_registers=240, dq_registers=0, max_registers=168)

# Plans for masks in blocks of 64, by columns: an SM has two programs, one of which runs under the
# other's beginnings and ends.
ONE_GROUP = {
    64: replace(NARROW, ds_stages=1, key_registers=0, dq_registers=0, groups=1, programs=2),
    128: replace(WIDE, ds_stages=1, key_registers=0, max_registers=128, groups=1, programs=2),
}

# Triton 3.6 finds registers for the keys: most calls with 64 columns are 4 to 12% faster. 3.7.1
# spills a few in each step and is 0 to 4% faster, but with dropout it spills many. 3.8 was only
# compiled. 3.9 does not find them, and would serialize wgmma (C7512): 8 to 19% longer.
KEYS_FIT = tuple(map(int, triton.__version__.split(".")[:2])) <= (3, 6)


@functools.cache  # it takes the CPU some microseconds
def backward_plan(head_dim: int, seq_k: int, features: Features) -> BackwardPlan | None:
    """Choose the plan for q (B, T_q, H, D) and k (B, T_k, H_kv, D).

    None if the kernel does not serve the call. Sinks need no support, because lse includes them.
    """
    if head_dim > 128:
        return None
    plan = WIDE if head_dim > 64 else replace(NARROW, keys_in_registers=KEYS_FIT)
    if features.mask_block_size == KEYS:
        if head_dim <= 64 and not features.packed:
            return None  # the two portable kernels, which add nothing in memory, are faster
        plan = ONE_GROUP[plan.block_d]
    # Calls that differ in sinks, empty rows or kinds of blocks share a compilation: the kernel does
    # not depend on these.
    features = replace(
        features, sinks=False, empty_rows=False, unmasked_loop=True, masked_loop=True
    )
    return replace(plan, ragged=seq_k % plan.block != 0, features=features)


def heads_together(seq_q: int, group: int, n_heads: int, plan: BackwardPlan) -> int:
    """Number of key-value heads, out of `n_heads`, that are processed at a time.

    With fewer heads, programs share more of what they read in the L2 cache. With more heads, fewer
    programs wait for each other if key tiles visit few queries, or unequal numbers. Grouped heads
    under a causal mask visit many, and unequal numbers: few such heads are best processed all
    together.
    """
    head_bytes = seq_q * group * plan.block_d * (2 + 2 + 4)
    if not plan.has_block_list:
        unequal_tiles = plan.features.causal and not plan.features.window
        if unequal_tiles and group >= LONG_GROUP and n_heads <= MOST_HEADS:
            return n_heads
        return max(1, min(n_heads, MOST_HEADS, SECTION_BYTES // head_bytes))
    # Under a causal mask columns differ in length: with twice as many heads fewer programs wait.
    scale = 2 if plan.features.causal else 1
    n_cached = min(MOST_HEADS, scale * SPARSE_SECTION_BYTES // head_bytes)
    return min(n_heads, max(scale, n_cached))
