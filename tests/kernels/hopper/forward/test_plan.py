"""Plans of the Hopper forward pass cover all that a call masks."""

import itertools

import pytest
import torch

from kernels.hopper.forward.plan import (
    BLOCK_LIST_PLANS,
    FOUR_GROUPS,
    ROWS,
    SHORT_CAUSAL,
    SHORT_FULL,
    THREE_GROUPS,
    WIDE,
    forward_plan,
)
from kernels.options import Features
from kernels.reference.standard import visible_keys

CAUSAL = Features(causal=True)
LENGTHS = [1, 64, 65, 127, 128, 192, 200, 256, 300, 4224]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_only_the_first_tiles_of_a_group_hide_late_keys(causal, head_dim):
    """A group visits its tiles from the last one down, and masks the first `cut` of them."""
    for seq_q, seq_k in itertools.product(LENGTHS, LENGTHS):
        plan = forward_plan(head_dim, seq_q, seq_k, Features(causal=causal))
        # end of the keys that each query sees
        ends = visible_keys(seq_q, seq_k, causal=causal).view(seq_q, seq_k).sum(-1)
        for group_ends in ends.split(ROWS):
            last = (int(group_ends.max()) - 1) // plan.block_n
            last_end = plan.block_n * (last + 1)
            hiding = {int(end) // plan.block_n for end in group_ends[group_ends < last_end]}
            allowed = [set(), {last}, set(range(last + 1))][plan.cut]
            assert hiding <= allowed, (seq_q, seq_k, plan)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_a_group_never_waits_for_a_stage_that_it_holds(causal, window, head_dim):
    """A group holds one stage while it skips tiles that only later groups see."""
    for seq_q, seq_k in itertools.product([1, 65, 192, 300, 4224], repeat=2):
        plan = forward_plan(head_dim, seq_q, seq_k, Features(causal=causal, window=bool(window)))
        visible = visible_keys(seq_q, seq_k, causal=causal, window_size=window).view(seq_q, seq_k)
        ends = (visible * torch.arange(1, seq_k + 1)).amax(-1)
        for tile_ends in ends.split(plan.groups * ROWS):
            tiles = [-(-int(rows.max()) // plan.block_n) for rows in tile_ends.split(ROWS)]
            assert max(tiles) - max(1, min(tiles)) < plan.stages, (seq_q, seq_k, plan)


@pytest.mark.parametrize(("features", "short"), [(CAUSAL, SHORT_CAUSAL), (Features(), SHORT_FULL)])
def test_long_rows_use_larger_tiles(features, short):
    assert forward_plan(64, short, short, features).groups == FOUR_GROUPS.groups
    assert forward_plan(64, short + 128, short + 128, features).groups == THREE_GROUPS.groups
    assert forward_plan(128, short, short, features).groups == WIDE.groups


def test_plans_fit_the_registers_of_an_sm():
    for head_dim, seq, features in itertools.product(
        (64, 128, 256),
        (SHORT_FULL, SHORT_CAUSAL + 128),
        (CAUSAL, Features(), Features(documents=True)),
    ):
        assert_registers_fit(forward_plan(head_dim, seq, seq, features))
    for plan in BLOCK_LIST_PLANS.values():
        assert_registers_fit(plan)


def assert_registers_fit(plan):
    groups = plan.teams * plan.groups
    # the first group gets the rest; the warps of the producers count as four
    roles = groups * plan.consumer_registers + plan.producer_registers
    assert roles <= (groups + 1) * plan.max_registers
    assert 128 * (groups + 1) * plan.max_registers <= 65_536
