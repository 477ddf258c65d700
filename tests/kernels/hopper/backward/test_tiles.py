"""Row tiles that key tiles visit in the backward pass, by the kernel's own arithmetic in Python.

The kernel would hang if its roles disagreed about the blocks, or if no tile released a semaphore.
"""

import random
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from kernels.hopper import scheduler
from kernels.hopper.backward import tiles as key_tiles
from kernels.hopper.backward.plan import BLOCK, KEYS, QUERIES, backward_plan, heads_together
from kernels.mask import schedule as mask_schedule
from kernels.mask.packing import ALL_PARTS
from kernels.options import Features
from kernels.triton import block_ranges
from tests.kernels.hopper.in_python import (
    GL,
    Number,
    Pointer,
    all_in_parts,
    document_bounds,
    packed_in_python,
    random_block_mask,
    random_call,
    visible_pairs,
)


@pytest.fixture(autouse=True)
def in_python(monkeypatch):
    """The functions of tiles.py as plain Python."""
    monkeypatch.setattr(key_tiles, "gl", GL)
    monkeypatch.setattr(key_tiles, "opaque", lambda x: x)
    monkeypatch.setattr(scheduler, "gl", GL)
    monkeypatch.setattr(block_ranges, "tl", GL)
    for name, value in (("M", QUERIES), ("N", BLOCK), ("GROUP_N", KEYS), ("BLOCK", BLOCK)):
        monkeypatch.setattr(key_tiles, name, value)
    monkeypatch.setattr(key_tiles, "locate", scheduler.locate.fn)
    monkeypatch.setattr(key_tiles, "SPLIT", mask_schedule.SPLIT_STRIDE)
    monkeypatch.setattr(mask_schedule, "SPLIT_VISITS", 2)  # so that short calls have splits
    functions = packed_in_python(monkeypatch)
    for name, function in vars(key_tiles).copy().items():
        if hasattr(function, "fn"):
            monkeypatch.setattr(key_tiles, name, function.fn)
    return SimpleNamespace(**functions)


def second(x):
    """Array of two batch elements, the second of which is x."""
    return np.concatenate([np.flip(x), x])


def calls(seed):
    """(call, plan, visible pairs) of random calls of one head, for the second batch element."""
    draw = random.Random(seed)
    for _ in range(200):
        seq_q, seq_k, features, window_size, doc_start, kv_lengths = random_call(draw)
        tiles, blocks = document_bounds(second(doc_start), -(-seq_k // BLOCK) * 2, KEYS)
        call = SimpleNamespace(
            seq_q=seq_q, seq_k=seq_k, window_size=window_size,
            lengths_ptr=Pointer(second(kv_lengths)), doc_ptr=Pointer(second(doc_start)),
            doc_blocks_ptr=Pointer(blocks), doc_tiles_ptr=Pointer(tiles),
        )  # fmt: skip
        visible = visible_pairs(seq_q, seq_k, features, window_size, doc_start, kv_lengths)
        yield call, backward_plan(64, seq_k, features), visible


BATCH = Number(1)


def check_visits(tiles, whole, key_tile, cid, visible, plan, label):
    """Assert that a group visits all row tiles that see its keys, and masks those that see a part.

    Args:
        tiles: the row tiles that it visits, with the parts of each.
        whole: begin and end of the rows that need no mask.
    """
    start = key_tile * plan.block + cid * KEYS
    keys = visible[:, start : start + KEYS]
    for row_tile, seen in enumerate(keys.split(QUERIES)):
        visited = row_tile in tiles
        assert visited or not seen.any(), label
        start_m = row_tile * QUERIES
        masked = plan.masks and not whole[0] <= start_m <= whole[1] - QUERIES
        if visited and not masked and tiles[row_tile] == ALL_PARTS:
            assert seen.all() and seen.shape[1] == KEYS, label


@pytest.mark.parametrize("seed", range(4))
def test_groups_visit_all_row_tiles_that_see_them_and_mask_hidden_pairs(seed):
    for call, plan, visible in calls(seed):
        for key_tile in range(-(-call.seq_k // BLOCK)):
            first, end = key_tiles.visited_blocks(key_tile, BATCH, call, plan)
            steps = (end - first) * BLOCK // QUERIES
            assert 0 <= first <= end <= -(-call.seq_q // BLOCK), (call, plan, key_tile)
            row_tiles = range(first * BLOCK // QUERIES, end * BLOCK // QUERIES)
            for cid, way in product(range(2), (1, -1)):
                label = (call, plan, key_tile, cid, way)
                work = key_tiles.Work(key_tile, BATCH, way, first, end)
                skipped, *whole = key_tiles.group_view(work, cid, BATCH, call, plan)
                assert skipped in (0, cid) and skipped <= steps, label
                visited = [key_tiles.row_tile_at(i, work, call, plan) for i in range(steps)]
                assert visited == list(row_tiles[::way]), label
                tiles = dict.fromkeys(visited[skipped:], ALL_PARTS)
                check_visits(tiles, whole, key_tile, cid, visible, plan, label)


@pytest.mark.parametrize("seed", range(4, 8))
def test_key_tiles_add_to_a_block_in_the_order_of_their_work_index(seed):
    """So no tile waits for a later work index, and each block has one first and one last tile."""
    for call, plan, _ in calls(seed):
        n_heads, n_tiles = 5, -(-call.seq_k // BLOCK)
        section = 1 + call.seq_q % n_heads
        order = SimpleNamespace(n_tiles=n_tiles, n_heads=n_heads, section=section)
        ranks = {}
        for work_index in range(n_tiles * n_heads):
            key_tile, head, way = map(int, key_tiles.key_tile_of(work_index, order, call, plan))
            first, end = key_tiles.visited_blocks(key_tile, BATCH, call, plan)
            work = key_tiles.Work(key_tile, head, way, first, end)
            for block in range(first, end):
                pairs = ranks.setdefault((head, block), [])
                pairs.append(tuple(key_tiles.dq_rank(block, 0, work, BATCH, call, plan)))
        assert len(ranks) == n_heads * -(-call.seq_q // BLOCK), call
        for pairs in ranks.values():
            assert pairs == [(rank, len(pairs) - 1) for rank in range(len(pairs))], call


def masked_calls(seed):
    """(call, plan, visible pairs of two heads, visible pairs without the mask) of random calls."""
    draw = random.Random(seed)
    for _ in range(60):
        seq_q, seq_k, features, window_size, doc_start, kv_lengths = random_call(draw)
        block_size = draw.choice([16, 32, KEYS, BLOCK])
        mask = random_block_mask(draw, seq_q, seq_k, block_size, draw.choice([1, 2]))
        lists = mask.lists(
            seq_q, seq_k, causal=features.causal,
            window_size=window_size if features.window else None,
            all_partial=features.documents or features.lengths,
            dq_schedule=True,
            block_size=max(block_size, KEYS),
        )  # fmt: skip
        tiles, _ = document_bounds(second(doc_start), -(-seq_k // BLOCK) * 2, KEYS)
        ranges = lists.col_ranges.numpy()
        call = SimpleNamespace(
            seq_q=seq_q, seq_k=seq_k, window_size=window_size, n_head=2, group=1,
            lengths_ptr=Pointer(second(kv_lengths)), doc_ptr=Pointer(second(doc_start)),
            doc_tiles_ptr=Pointer(tiles), ranges_ptr=Pointer(ranges),
            visits_ptr=Pointer(lists.visits.numpy()), n_ranges=ranges.shape[1], cuts=lists.cuts,
            mask_stride=ranges[0].size if mask.n_head > 1 else 0,
        )  # fmt: skip
        without_mask = visible_pairs(seq_q, seq_k, features, window_size, doc_start, kv_lengths)
        visible = (without_mask & mask.to_dense(seq_q, seq_k)).expand(2, -1, -1)
        features = replace(features, mask_block_size=lists.block_size, packed=lists.packed)
        plan = backward_plan(128, seq_k, features)
        assert plan.block == lists.block_size
        yield call, plan, visible, without_mask


def work_items(call, plan):
    """The `Work` of all work indices of two heads, in order."""
    order = SimpleNamespace(n_tiles=call.n_ranges, n_heads=2, section=2)
    for work_index in range(call.n_ranges * 2):
        work = key_tiles.Work(*map(int, key_tiles.work_of(work_index, order, call, plan)))
        yield key_tiles.work_of_head(work, work.batch_kv, 0, call, plan)


@pytest.mark.parametrize("seed", range(4))
def test_groups_visit_the_blocks_of_their_column(seed, in_python):
    for call, plan, visible, without_mask in masked_calls(seed):
        done = {}
        for work in work_items(call, plan):
            key_tile, head, *_ = work
            steps = (work.end - work.first) * plan.block // QUERIES
            visited = [key_tiles.row_tile_at(i, work, call, plan) for i in range(steps)]
            for cid in range(plan.groups):
                label = (call, plan, key_tile, cid, head)
                _, *whole = key_tiles.group_view(work, cid, BATCH, call, plan)
                # like `head_skips` of mma.py, which reads the row tile in shared memory
                skips = cid * (
                    plan.features.causal
                    and steps > 0
                    and bool(key_tiles.skips_row_tile(visited[0], key_tile, cid, call, plan))
                )
                # from all splits of a column
                tiles, _ = done.setdefault((key_tile, head, cid), ({}, whole))
                assert not any(in_python.number_of(x, plan) in tiles for x in visited), label
                tiles |= {
                    in_python.number_of(x, plan): in_python.parts_of(x, plan)
                    for x in visited[skips:]
                }
        for (key_tile, head, cid), (tiles, whole) in done.items():
            label = (call, plan, key_tile, cid, head)
            check_visits(tiles, whole, key_tile, cid, visible[head], plan, label)
            if plan.features.packed:
                for row_tile, parts in tiles.items():
                    tile = slice(row_tile * QUERIES, (row_tile + 1) * QUERIES)
                    keys = slice(key_tile * KEYS, (key_tile + 1) * KEYS)
                    seen = visible[head][tile, keys]
                    covered = all_in_parts(in_python.in_parts, parts)
                    covered = covered[: seen.shape[0], : seen.shape[1]]
                    assert torch.equal(seen, without_mask[tile, keys] & covered), label
        assert len(done) == 2 * plan.groups * -(-call.seq_k // plan.block)


def test_each_split_of_a_column_has_its_own_slot(in_python):
    n_splits = 0
    for call, plan, *_ in masked_calls(8):
        order = SimpleNamespace(n_heads=2)
        slots_of = {}
        for work in work_items(call, plan):
            slot = key_tiles.split_of(work, order, plan)
            slots_of.setdefault((work.batch_kv, work.key_tile), []).append(int(slot))
        ranges = {} if call.cuts is None else {c: range(i, j) for c, i, j in call.cuts.tolist()}
        n_splits += len(ranges)
        for (head, key_tile), slots in slots_of.items():
            if key_tile in ranges:
                assert sorted(slots) == [2 * split + head for split in ranges[key_tile]]
            else:
                assert len(slots) == 1 and slots[0] < 0
    assert n_splits > 2


@pytest.mark.parametrize("seed", range(4, 8))
def test_columns_add_to_a_block_in_the_order_of_their_work_index(seed, in_python):
    for call, plan, visible, _ in masked_calls(seed):
        ranks = {}
        for work in work_items(call, plan):
            for i in range(work.end - work.first):
                listed, place = key_tiles.visit_at(i, work, call, plan)
                block = in_python.number_of(listed, plan)
                before, last = key_tiles.dq_rank(block, place, work, BATCH, call, plan)
                ranks.setdefault((work.batch_kv, block), []).append((before, before < last))
        for pairs in ranks.values():
            n = len(pairs)
            assert pairs == [(rank, rank < n - 1) for rank in range(n)], call
        for head, block in product(range(2), range(-(-call.seq_q // plan.block))):
            seen = visible[head, block * plan.block : (block + 1) * plan.block].any()
            assert not seen or (head, block) in ranks, call


def test_some_heads_are_processed_together():
    for block_size, causal in product((0, BLOCK), (True, False)):
        plan = backward_plan(64, 1024, Features(causal=causal, mask_block_size=block_size))
        short, long, longer = (heads_together(seq, 1, 99, plan) for seq in (1024, 16_384, 2**20))
        assert short > long > longer >= 1
        assert heads_together(1024, 1, 2, plan) == 2


def test_few_grouped_heads_are_all_processed_together_under_a_causal_mask():
    causal, full, window = (
        backward_plan(64, 1024, Features(causal=causal, window=window))
        for causal, window in ((True, False), (False, False), (True, True))
    )
    assert heads_together(16_384, 8, 4, causal) == 4
    assert heads_together(16_384, 4, 16, causal) == 16
    for group, n_heads, plan in ((8, 17, causal), (2, 16, causal), (8, 4, full), (8, 4, window)):
        assert heads_together(16_384, group, n_heads, plan) < n_heads
