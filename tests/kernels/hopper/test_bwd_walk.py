"""Which queries key tiles visit in the backward pass, by the kernel's own arithmetic in Python.

A program whose roles disagreed about its walk, or a turn that nobody ends, would wait for ever.
"""

import random
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

from kernels.hopper import bwd_walk, schedule
from kernels.hopper.bwd_plan import BLOCK, KEYS, QUERIES, backward_plan, heads_together
from kernels.options import Features
from kernels.reference.standard import visible_keys

GL = SimpleNamespace(
    minimum=min,
    maximum=max,
    where=lambda condition, a, b: a if condition else b,
    cdiv=lambda a, b: -(-a // b),
)


@pytest.fixture(autouse=True)
def in_python(monkeypatch):
    """The functions of bwd_walk.py as plain Python."""
    monkeypatch.setattr(bwd_walk, "gl", GL)
    monkeypatch.setattr(schedule, "gl", GL)
    for name, value in (("M", QUERIES), ("N", KEYS), ("GROUP_N", KEYS // 2), ("BLOCK", BLOCK)):
        monkeypatch.setattr(bwd_walk, name, value)
    monkeypatch.setattr(bwd_walk, "locate", schedule.locate.fn)
    for name in ("visited_blocks", "group_view", "turn", "key_tile_of"):
        monkeypatch.setattr(bwd_walk, name, getattr(bwd_walk, name).fn)


def calls(seed):
    draw = random.Random(seed)
    for _ in range(100):
        seq_q, seq_k = draw.randint(1, 700), draw.randint(1, 700)
        if draw.random() < 0.4:
            seq_q = seq_k = draw.choice([seq_k, 64, 128, 192, 256, 640])
        yield SimpleNamespace(seq_q=seq_q, seq_k=seq_k)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_groups_visit_what_sees_them_and_mask_what_is_hidden(causal, seed):
    for call in calls(seed):
        plan = backward_plan(64, call.seq_k, Features(causal=causal))
        visible = visible_keys(call.seq_q, call.seq_k, causal=causal).view(call.seq_q, call.seq_k)
        for key_tile in range(-(-call.seq_k // KEYS)):
            first, end = bwd_walk.visited_blocks(key_tile, call, plan)
            steps = (end - first) * BLOCK // QUERIES
            for cid in range(2):
                said = (call, plan, key_tile, cid)
                skipped, whole_from = bwd_walk.group_view(key_tile, cid, call, plan)
                assert steps > 1 and skipped in (0, cid), said
                start = key_tile * KEYS + cid * KEYS // 2
                keys = visible[:, start : start + KEYS // 2]
                for row_tile, seen in enumerate(keys.split(QUERIES)):
                    step = row_tile - first * BLOCK // QUERIES
                    visited = skipped <= step < steps
                    assert visited or not seen.any(), said
                    masked = plan.masks and row_tile * QUERIES < whole_from
                    if visited and not masked:
                        assert seen.all() and seen.shape[1] == KEYS // 2, said


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_key_tiles_add_to_a_block_in_the_order_in_which_they_are_drawn(causal):
    """So nobody waits for a tile that is not drawn yet; and one is the first, one the last."""
    for call in calls(3):
        plan = backward_plan(64, call.seq_k, Features(causal=causal))
        n_heads, n_tiles = 5, -(-call.seq_k // KEYS)
        order = SimpleNamespace(n_tiles=n_tiles, n_heads=n_heads, section=3)
        turns = {}
        for ticket in range(n_tiles * n_heads):
            key_tile, head = bwd_walk.key_tile_of(ticket, order, plan)
            first, end = bwd_walk.visited_blocks(key_tile, call, plan)
            for block in range(first, end):
                taken = turns.setdefault((head, block), [])
                taken.append(bwd_walk.turn(block, key_tile, call, plan))
        assert len(turns) == n_heads * -(-call.seq_q // BLOCK)
        for taken in turns.values():
            assert taken == [(rank, len(taken) - 1) for rank in range(len(taken))], call


def test_some_heads_are_worked_on_together():
    short, long, longer = (heads_together(seq, 1, 64) for seq in (1024, 16_384, 2**20))
    assert short > long > longer == 1
