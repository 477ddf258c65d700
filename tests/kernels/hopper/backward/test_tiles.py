"""Which queries key tiles visit in the backward pass, by the kernel's own arithmetic in Python.

A program whose roles disagreed about its blocks, or a semaphore that nobody releases, would hang.
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
    a_call,
    all_in_parts,
    document_bounds,
    mask_of,
    packed_in_python,
    what_is_seen,
)


@pytest.fixture(autouse=True)
def in_python(monkeypatch):
    """The functions of tiles.py as plain Python."""
    monkeypatch.setattr(key_tiles, "gl", GL)
    monkeypatch.setattr(scheduler, "gl", GL)
    monkeypatch.setattr(block_ranges, "tl", GL)
    for name, value in (("M", QUERIES), ("N", BLOCK), ("GROUP_N", KEYS), ("BLOCK", BLOCK)):
        monkeypatch.setattr(key_tiles, name, value)
    monkeypatch.setattr(key_tiles, "locate", scheduler.locate.fn)
    monkeypatch.setattr(key_tiles, "SPLIT", mask_schedule.SPLIT_STRIDE)
    monkeypatch.setattr(mask_schedule, "SPLIT_VISITS", 2)  # so that short calls have pieces
    functions = packed_in_python(monkeypatch)
    for name, function in vars(key_tiles).copy().items():
        if hasattr(function, "fn"):
            monkeypatch.setattr(key_tiles, name, function.fn)
    return SimpleNamespace(**functions)


def second(x):
    """An argument of two batch elements, the second of which is x."""
    return np.concatenate([np.flip(x), x])


def calls(seed):
    """(call, plan, what each query sees) of random calls of one head, in the second element."""
    draw = random.Random(seed)
    for _ in range(200):
        seq_q, seq_k, features, window_size, doc_start, kv_lengths = a_call(draw)
        tiles, blocks = document_bounds(second(doc_start), -(-seq_k // BLOCK) * 2, KEYS)
        call = SimpleNamespace(
            seq_q=seq_q, seq_k=seq_k, window_size=window_size,
            lengths_ptr=Pointer(second(kv_lengths)), doc_ptr=Pointer(second(doc_start)),
            doc_blocks_ptr=Pointer(blocks), doc_tiles_ptr=Pointer(tiles),
        )  # fmt: skip
        visible = what_is_seen(seq_q, seq_k, features, window_size, doc_start, kv_lengths)
        yield call, backward_plan(64, seq_k, features), visible


BATCH = Number(1)


def check_visits(tiles, whole, key_tile, cid, visible, plan, said):
    """A group visits all row tiles that see its keys, and masks those that do not see all.

    Args:
        tiles: those that it visits, and the parts of each; whole: what it masks by its place.
    """
    start = key_tile * plan.block + cid * KEYS
    keys = visible[:, start : start + KEYS]
    for row_tile, seen in enumerate(keys.split(QUERIES)):
        visited = row_tile in tiles
        assert visited or not seen.any(), said
        start_m = row_tile * QUERIES
        masked = plan.masks and not whole[0] <= start_m <= whole[1] - QUERIES
        if visited and not masked and tiles[row_tile] == ALL_PARTS:
            assert seen.all() and seen.shape[1] == KEYS, said


@pytest.mark.parametrize("seed", range(4))
def test_groups_visit_what_sees_them_and_mask_what_is_hidden(seed):
    for call, plan, visible in calls(seed):
        for key_tile in range(-(-call.seq_k // BLOCK)):
            first, end = key_tiles.visited_blocks(key_tile, BATCH, call, plan)
            steps = (end - first) * BLOCK // QUERIES
            assert 0 <= first <= end <= -(-call.seq_q // BLOCK), (call, plan, key_tile)
            places = range(first * BLOCK // QUERIES, end * BLOCK // QUERIES)
            for cid, way in product(range(2), (1, -1)):
                said = (call, plan, key_tile, cid, way)
                work = key_tiles.Work(key_tile, BATCH, way, first, end)
                skipped, *whole = key_tiles.group_view(work, cid, BATCH, call, plan)
                assert skipped in (0, cid) and skipped <= steps, said
                visited = [key_tiles.row_tile_at(i, work, call, plan) for i in range(steps)]
                assert visited == list(places[::way]), said
                tiles = dict.fromkeys(visited[skipped:], ALL_PARTS)
                check_visits(tiles, whole, key_tile, cid, visible, plan, said)


@pytest.mark.parametrize("seed", range(4, 8))
def test_key_tiles_add_to_a_block_in_the_order_in_which_they_are_drawn(seed):
    """So nobody waits for a tile that is not drawn yet; and one is the first, one the last."""
    for call, plan, _ in calls(seed):
        n_heads, n_tiles = 5, -(-call.seq_k // BLOCK)
        section = 1 + call.seq_q % n_heads
        order = SimpleNamespace(n_tiles=n_tiles, n_heads=n_heads, section=section)
        turns = {}
        for work_index in range(n_tiles * n_heads):
            key_tile, head, way = map(int, key_tiles.key_tile_of(work_index, order, call, plan))
            first, end = key_tiles.visited_blocks(key_tile, BATCH, call, plan)
            work = key_tiles.Work(key_tile, head, way, first, end)
            for block in range(first, end):
                taken = turns.setdefault((head, block), [])
                taken.append(tuple(key_tiles.dq_rank(block, 0, work, BATCH, call, plan)))
        assert len(turns) == n_heads * -(-call.seq_q // BLOCK), call
        for taken in turns.values():
            assert taken == [(rank, len(taken) - 1) for rank in range(len(taken))], call


def masked_calls(seed):
    """Random calls with a mask: (call, plan, what each query of each of two heads sees, what it
    would see without the mask)."""
    draw = random.Random(seed)
    for _ in range(60):
        seq_q, seq_k, features, window_size, doc_start, kv_lengths = a_call(draw)
        block_size = draw.choice([16, 32, KEYS, BLOCK])
        mask = mask_of(draw, seq_q, seq_k, block_size, draw.choice([1, 2]))
        lists = mask.lists(
            seq_q, seq_k, causal=features.causal,
            window_size=window_size if features.window else None,
            all_partial=features.documents or features.lengths,
            dq_schedule=True,
            block_size=max(block_size, KEYS),
        )  # fmt: skip
        tiles, _ = document_bounds(second(doc_start), -(-seq_k // BLOCK) * 2, KEYS)
        walks = lists.walks.numpy()
        call = SimpleNamespace(
            seq_q=seq_q, seq_k=seq_k, window_size=window_size, n_head=2, group=1,
            lengths_ptr=Pointer(second(kv_lengths)), doc_ptr=Pointer(second(doc_start)),
            doc_tiles_ptr=Pointer(tiles), ranges_ptr=Pointer(walks),
            visits_ptr=Pointer(lists.visits.numpy()), n_walks=walks.shape[1], cuts=lists.cuts,
            mask_stride=walks[0].size if mask.n_head > 1 else 0,
        )  # fmt: skip
        of_others = what_is_seen(seq_q, seq_k, features, window_size, doc_start, kv_lengths)
        visible = (of_others & mask.to_dense(seq_q, seq_k)).expand(2, -1, -1)
        features = replace(features, mask_block_size=lists.block_size, packed=lists.packed)
        plan = backward_plan(128, seq_k, features)
        assert plan.block == lists.block_size
        yield call, plan, visible, of_others


def drawn_work(call, plan):
    """The `Work` of all tickets for two heads, as they are drawn."""
    order = SimpleNamespace(n_tiles=call.n_walks, n_heads=2, section=2)
    for work_index in range(call.n_walks * 2):
        work = key_tiles.Work(*map(int, key_tiles.work_of(work_index, order, call, plan)))
        yield key_tiles.work_of_head(work, work.batch_kv, 0, call, plan)


@pytest.mark.parametrize("seed", range(4))
def test_groups_visit_the_blocks_of_their_column(seed, in_python):
    for call, plan, visible, of_others in masked_calls(seed):
        done = {}
        for work in drawn_work(call, plan):
            key_tile, head, *_ = work
            steps = (work.end - work.first) * plan.block // QUERIES
            visited = [key_tiles.row_tile_at(i, work, call, plan) for i in range(steps)]
            for cid in range(plan.groups):
                said = (call, plan, key_tile, cid, head)
                _, *whole = key_tiles.group_view(work, cid, BATCH, call, plan)
                # as `head_skips` of mma.py, which reads the row tile in shared memory
                skips = cid * (
                    plan.features.causal
                    and steps > 0
                    and bool(key_tiles.skips_row_tile(visited[0], key_tile, cid, call, plan))
                )
                # of all pieces of a column
                tiles, _ = done.setdefault((key_tile, head, cid), ({}, whole))
                assert not any(in_python.number_of(x, plan) in tiles for x in visited), said
                tiles |= {
                    in_python.number_of(x, plan): in_python.parts_of(x, plan)
                    for x in visited[skips:]
                }
        for (key_tile, head, cid), (tiles, whole) in done.items():
            said = (call, plan, key_tile, cid, head)
            check_visits(tiles, whole, key_tile, cid, visible[head], plan, said)
            if plan.features.packed:
                for row_tile, parts in tiles.items():
                    tile = slice(row_tile * QUERIES, (row_tile + 1) * QUERIES)
                    keys = slice(key_tile * KEYS, (key_tile + 1) * KEYS)
                    seen = visible[head][tile, keys]
                    shown = all_in_parts(in_python.in_parts, parts)
                    shown = shown[: seen.shape[0], : seen.shape[1]]
                    assert torch.equal(seen, of_others[tile, keys] & shown), said
        assert len(done) == 2 * plan.groups * -(-call.seq_k // plan.block)


def test_each_piece_of_a_column_has_a_place_of_its_own(in_python):
    cut = 0
    for call, plan, *_ in masked_calls(8):
        order = SimpleNamespace(n_heads=2)
        places = {}
        for work in drawn_work(call, plan):
            place = key_tiles.split_of(work, order, plan)
            places.setdefault((work.batch_kv, work.key_tile), []).append(int(place))
        ranges = {} if call.cuts is None else {c: range(i, j) for c, i, j in call.cuts.tolist()}
        cut += len(ranges)
        for (head, key_tile), found in places.items():
            if key_tile in ranges:
                assert sorted(found) == [2 * piece + head for piece in ranges[key_tile]]
            else:
                assert len(found) == 1 and found[0] < 0
    assert cut > 2


@pytest.mark.parametrize("seed", range(4, 8))
def test_columns_add_to_a_block_in_the_order_in_which_they_are_drawn(seed, in_python):
    for call, plan, visible, _ in masked_calls(seed):
        turns = {}
        for work in drawn_work(call, plan):
            for i in range(work.end - work.first):
                listed, place = key_tiles.visit_at(i, work, call, plan)
                block = in_python.number_of(listed, plan)
                before, last = key_tiles.dq_rank(block, place, work, BATCH, call, plan)
                turns.setdefault((work.batch_kv, block), []).append((before, before < last))
        for taken in turns.values():
            n = len(taken)
            assert taken == [(rank, rank < n - 1) for rank in range(n)], call
        for head, block in product(range(2), range(-(-call.seq_q // plan.block))):
            seen = visible[head, block * plan.block : (block + 1) * plan.block].any()
            assert not seen or (head, block) in turns, call


def test_some_heads_are_worked_on_together():
    for block_size, causal in product((0, BLOCK), (True, False)):
        plan = backward_plan(64, 1024, Features(causal=causal, mask_block_size=block_size))
        short, long, longer = (heads_together(seq, 1, 99, plan) for seq in (1024, 16_384, 2**20))
        assert short > long > longer >= 1
        assert heads_together(1024, 1, 2, plan) == 2


def test_few_grouped_heads_are_worked_on_all_together_under_a_causal_mask():
    causal, full, window = (
        backward_plan(64, 1024, Features(causal=causal, window=window))
        for causal, window in ((True, False), (False, False), (True, True))
    )
    assert heads_together(16_384, 8, 4, causal) == 4
    assert heads_together(16_384, 4, 16, causal) == 16
    for group, n_heads, plan in ((8, 17, causal), (2, 16, causal), (8, 4, full), (8, 4, window)):
        assert heads_together(16_384, group, n_heads, plan) < n_heads
