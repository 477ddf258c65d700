"""Plans of the forward kernel: tiles, roles and registers, measured on an H100 (docs/hopper.md)."""

import functools
from dataclasses import dataclass, field, replace
from typing import Any

from ...options import Features

MOST_TEAMS = 3  # per program
ROWS = 64  # queries of a consumer group: the rows of one wgmma
# Numbers of queries up to which four small groups are faster than three large ones
SHORT_CAUSAL, SHORT_FULL = 4096, 1024
SECTION_BYTES = 8 * 2**20  # keys and values that are processed together; L2 has 50 MB


@dataclass(frozen=True)
class Plan:
    """Tiles, roles and features of the forward kernel: each plan in use is compiled once."""

    block_d: int  # columns of a tile, D rounded up to 64, 128 or 256
    block_n: int  # keys of a tile
    groups: int  # consumer groups per team, with 64 queries each
    stages: int  # of the ring of keys and values
    q_stages: int  # row tiles whose queries are in shared memory
    # Registers per thread of all consumer groups but the first, which gets what the other roles
    # leave of max_registers per thread
    consumer_registers: int
    max_registers: int
    producer_registers: int = 24
    teams: int = 1  # per program; a team is a producer and its groups, with row tiles of its own
    # How many of the first key tiles of a group may hide late keys: 0, 1, or 2 for more than one
    cut: int = 0
    features: Features = field(default_factory=Features)  # options of the call

    @property
    def compiler_options(self) -> dict[str, Any]:
        """Options of Triton's compiler. FP fusion is set because releases differ in its default."""
        return {"num_warps": 4, "maxnreg": self.max_registers, "enable_fp_fusion": True}

    @property
    def worker_warps(self) -> list[int]:
        """Warps of each role but the first consumer: the other consumers, then the producers."""
        return [4] * (self.teams * self.groups - 1) + [1] * MOST_TEAMS

    @property
    def worker_registers(self) -> list[int]:
        """Registers per thread of each role in `worker_warps`."""
        consumers = self.teams * self.groups - 1
        return [self.consumer_registers] * consumers + [self.producer_registers] * MOST_TEAMS

    @property
    def out_over_q(self) -> bool:
        """Whether the output overwrites the queries: shared memory cannot hold both."""
        return self.block_d == 256

    @property
    def two_chains(self) -> bool:
        """Whether row maxima take two chains of instructions.

        That is 1% faster at 64 columns, and at 128 columns under a causal mask. It is 1% slower at
        128 columns without one. At 256 columns it was not compared.
        """
        return self.features.causal or self.block_d == 64

    @property
    def pingpong(self) -> bool:
        """Whether the groups issue products in turn, each under the softmax of the others.

        Three groups gain 5% without a causal mask. All groups must visit equally many tiles.
        """
        return self.groups == 3 and not self.features.causal

    @property
    def low(self) -> bool:
        """Whether the key tiles that a group visits last may hide early keys."""
        return self.features.window or self.features.documents

    @property
    def has_block_list(self) -> bool:
        """Whether the key tiles of a row tile come from the list of a block-sparse mask."""
        return self.features.mask_block_size > 0

    @property
    def skips(self) -> bool:
        """Whether a group may see nothing of the key tiles that its row tile visits first."""
        if self.has_block_list:
            return self.features.causal and self.features.mask_block_size > self.block_n
        if self.features.window or self.features.documents:
            return True
        return self.features.causal and (self.groups * ROWS > self.block_n or self.cut > 1)


# A group spreads 64 x N scores and 64 x D outputs in fp32 over the registers of 128 threads. With
# more groups tiles are smaller, or fewer registers are left for masks.
TWO_GROUPS = Plan(64, 128, 2, 4, 2, consumer_registers=240, max_registers=168)
THREE_GROUPS = Plan(64, 128, 3, 4, 2, consumer_registers=160, max_registers=128)
FOUR_GROUPS = Plan(64, 64, 4, 4, 2, consumer_registers=112, max_registers=96)
WIDE = Plan(128, 128, 2, 2, 2, consumer_registers=240, max_registers=168)
WIDEST = Plan(256, 64, 2, 2, 1, consumer_registers=240, max_registers=168)

# Plans for block-sparse masks, by columns and block size: a row tile is a row of blocks. Rows are
# short, so several teams run under each other's beginnings and ends. Producers read ahead in the
# list, for which 24 registers are too few.
BLOCK_LIST_PLANS = {
    (64, 64): Plan(64, 64, 1, 3, 2, 152, max_registers=128, producer_registers=40, teams=3),
    (64, 128): Plan(64, 64, 2, 4, 2, 112, max_registers=96, producer_registers=32, teams=2),
    (128, 64): Plan(128, 64, 1, 2, 2, 232, max_registers=168, producer_registers=40, teams=2),
    (128, 128): replace(WIDE, consumer_registers=232, producer_registers=40),
    (256, 128): replace(WIDEST, consumer_registers=232, producer_registers=40),
}


@functools.cache  # it takes the CPU some microseconds
def forward_plan(head_dim: int, seq_q: int, seq_k: int, features: Features) -> Plan:
    """Choose the plan for q (B, T_q, H, D) and k (B, T_k, H_kv, D).

    At 64 columns more groups keep the tensor cores busier: four with small key tiles, which waste
    little under a causal mask, or on long rows three with larger tiles. A softcap, and masks beyond
    a diagonal or the end of the keys, need the registers that only two groups have.
    """
    causal = features.causal
    if features.mask_block_size > 0:
        block_d = next(d for d in (64, 128, 256) if head_dim <= d)
        plan = BLOCK_LIST_PLANS[block_d, features.mask_block_size]
    elif head_dim > 128:
        plan = WIDEST
    elif head_dim > 64:
        plan = WIDE
    else:
        short = SHORT_CAUSAL if causal else SHORT_FULL
        long = seq_q > short and not features.dropout
        plan = THREE_GROUPS if long else FOUR_GROUPS
        edges = max(causal, features.lengths)
        uncommon = features.window or features.documents or features.softcap
        if uncommon or cut_tiles(seq_q, seq_k, plan.block_n, features) > edges:
            plan = TWO_GROUPS
    if features.softcap or (features.dropout and causal):
        # These take many instructions per score. Only small tiles keep the code of a step within
        # the instruction cache.
        plan = replace(plan, block_n=64, stages=plan.stages * plan.block_n // 64)
    cut = cut_tiles(seq_q, seq_k, plan.block_n, features)
    plan = replace(plan, cut=cut, features=features)
    if plan.low and not plan.has_block_list:
        # The producer also computes the first visible key, for which 24 registers are too few.
        plan = replace(plan, consumer_registers=232, producer_registers=40)
    return plan


def cut_tiles(seq_q: int, seq_k: int, block_n: int, features: Features) -> int:
    """`Plan.cut` of a call."""
    if features.mask_block_size > 0:
        if not features.masked_loop:
            return 1 if features.empty_rows else 0
        limited = features.window or features.documents or features.lengths
        if features.packed or limited or not features.causal:
            return 2
        block_n = features.mask_block_size
    # A diagonal that begins on the edge of a tile stays within one tile of each group.
    if features.causal:
        return 1 if seq_k >= seq_q and (seq_k - seq_q) % block_n == 0 else 2
    if features.window:
        return 2
    return 0 if seq_k % block_n == 0 and not features.lengths else 1
