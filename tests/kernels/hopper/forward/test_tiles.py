"""Key tiles that are visited and masked, by the kernel's own arithmetic on numpy arrays.

Gluon has no interpreter. But tiles.py only computes with whole numbers, so its functions run in
Python once `gl` is replaced by a stand-in. If the producer and the groups of a program disagreed
about the ring, they would wait forever.
"""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from kernels.hopper import block_list, scheduler
from kernels.hopper import call as calls
from kernels.hopper.forward import plan as forward_plans
from kernels.hopper.forward import tiles as key_tiles
from kernels.hopper.forward.plan import ROWS, forward_plan
from kernels.triton import block_ranges
from tests.kernels.hopper.in_python import (
    GL,
    Number,
    Pointer,
    all_in_parts,
    packed_in_python,
    random_block_mask,
    random_call,
    visible_pairs,
)


@pytest.fixture
def in_python(monkeypatch):
    """The functions of tiles.py, and those that they call, as plain Python."""
    monkeypatch.setattr(block_ranges, "tl", GL)
    monkeypatch.setattr(key_tiles, "gl", GL)
    for name in ("visible_keys", "n_keys_of"):
        monkeypatch.setattr(key_tiles, name, getattr(block_ranges, name).fn)
    monkeypatch.setattr(calls, "gl", GL)
    monkeypatch.setattr(key_tiles, "M", ROWS)
    for name in ("SHORT_CAUSAL", "SHORT_FULL"):  # so that calls use all plans
        monkeypatch.setattr(forward_plans, name, 300)
    monkeypatch.setattr(block_list, "gl", GL)
    monkeypatch.setattr(block_list, "ENTRY", block_list.ENTRY.value)
    monkeypatch.setattr(block_list, "locate", scheduler.locate.fn)
    monkeypatch.setattr(scheduler, "gl", GL)
    packed = packed_in_python(monkeypatch)
    for module in (block_list, key_tiles):
        for name, function in vars(module).copy().items():
            if hasattr(function, "fn") and name not in ("visible_keys", "locate"):
                monkeypatch.setattr(module, name, function.fn)
    for name in ("block_list_row", "block_list_tile", "last_key_tile", "n_key_tiles"):
        monkeypatch.setattr(key_tiles, name, getattr(block_list, name))
    for name in ("number_of", "parts_of"):
        monkeypatch.setattr(key_tiles, name, packed[name])
    return packed["in_parts"]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_groups_visit_all_loaded_tiles_and_mask_hidden_pairs(head_dim, seed, in_python):
    draw = random.Random(seed)
    for _ in range(200):
        seq_q, seq_k, features, window_size, doc_start, kv_lengths = random_call(draw)
        plan = forward_plan.__wrapped__(head_dim, seq_q, seq_k, features)
        call = SimpleNamespace(
            seq_q=seq_q, seq_k=seq_k, window_size=window_size,
            doc_ptr=Pointer(doc_start), lengths_ptr=Pointer(kv_lengths),
        )  # fmt: skip
        visible = visible_pairs(seq_q, seq_k, features, window_size, doc_start, kv_lengths)
        batch = Number(0)
        for start in range(0, seq_q, plan.groups * ROWS):
            first, end = key_tiles.row_tile_keys(start, batch, call, plan)
            for cid in range(plan.groups):
                skipped, last, high, whole, low = key_tiles.group_tiles(
                    start, 0, cid, batch, call, plan
                )
                label = (seq_q, seq_k, plan, start, cid)
                assert min(skipped, high, whole, low) >= 0, label
                assert skipped + 1 + high + whole + low == end - first, label
                assert last == end - 1 - skipped, label
                # a group holds one stage while it waits for those that it skips
                assert skipped < plan.stages, label
                # pingpong groups have equal numbers of tiles
                assert not (skipped and plan.pingpong), label
                # code that is not compiled in would have nothing to do
                assert not (skipped and not plan.skips), label
                assert not (high and plan.cut < 2) and not (low and not plan.low), label
                keys = visible[start + cid * ROWS :][:ROWS].split(plan.block_n, dim=1)
                unmasked = set(range(last - high - whole, last - high))
                if plan.cut == 0 and not plan.low:
                    unmasked.add(last)
                for tile, seen in enumerate(keys):
                    if not first <= tile <= last:
                        assert not seen.any(), label
                    if tile in unmasked:
                        assert seen.all() and seen.shape[1] == plan.block_n, label
                assert not unmasked or max(unmasked) < len(keys), label


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_groups_visit_the_blocks_of_their_row(head_dim, block_size, seed, in_python):
    draw = random.Random(seed)
    for _ in range(60):
        seq_q, seq_k, features, window_size, doc_start, kv_lengths = random_call(draw)
        n_head = draw.choice([1, 2])
        mask = random_block_mask(draw, seq_q, seq_k, block_size, n_head)
        lists = mask.lists(
            seq_q, seq_k, causal=features.causal,
            window_size=window_size if features.window else None,
            all_partial=features.documents or features.lengths,
            block_size=max(block_size, 64),
        )  # fmt: skip
        features = replace(
            features, mask_block_size=lists.block_size, packed=lists.packed,
            unmasked_loop=lists.n_full > 0, masked_loop=lists.n_partial > 0,
            empty_rows=lists.n_empty > 0,
        )  # fmt: skip
        plan = forward_plan.__wrapped__(head_dim, seq_q, seq_k, features)
        rows, blocks = lists.rows.numpy(), lists.row_blocks.numpy()
        call = SimpleNamespace(
            seq_q=seq_q, seq_k=seq_k, window_size=window_size, n_head=2,
            doc_ptr=Pointer(doc_start), lengths_ptr=Pointer(kv_lengths),
            rows_ptr=Pointer(rows), row_blocks_ptr=Pointer(blocks),
            mask_stride=rows[0].size if n_head > 1 else 0,
        )  # fmt: skip
        visible = visible_pairs(seq_q, seq_k, features, window_size, doc_start, kv_lengths)
        order = scheduler.Order(rows.shape[1], 2, 2)
        row_tiles = set()
        for tile in range(rows.shape[1] * 2):
            start, head, row = key_tiles.row_of(tile, order, call, plan)
            row_tiles.add((int(start), int(head)))
            head_visible = visible & mask.to_dense(seq_q, seq_k)[head if n_head > 1 else 0]
            n = block_list.n_key_tiles(row, plan)
            loaded = [block_list.last_key_tile(row, plan)]
            loaded += [
                block_list.block_list_tile(place, row, call, plan)
                for place in reversed(range(n - 1))
            ]
            for cid in range(plan.groups):
                skipped, last, high, whole, low = key_tiles.group_tiles(
                    start, row, cid, Number(0), call, plan
                )
                label = (seq_q, seq_k, plan, start, cid)
                assert min(skipped, high, whole) >= 0 and low == 0, label
                assert skipped + 1 + high + whole == n and skipped < plan.stages, label
                assert not (skipped and not plan.skips) and not (high and plan.cut < 2), label
                visited = [key_tiles.first_tile_of(skipped, last, row, plan)]
                visited += [
                    key_tiles.tile_of(last - step, row, call, plan)
                    for step in range(1, n - skipped)
                ]
                numbers = [key_tiles.number_of(tile, plan) for tile in loaded[skipped:]]
                assert [start_n for start_n, _ in visited] == [x * plan.block_n for x in numbers]
                keys = head_visible[start + cid * ROWS :][:ROWS].split(plan.block_n, dim=1)
                unmasked_keys = visible[start + cid * ROWS :][:ROWS].split(plan.block_n, dim=1)
                assert not any(x.any() for i, x in enumerate(keys) if i not in numbers), label
                masked = 1 + high if plan.cut > 0 else 0
                for step, number in enumerate(numbers):
                    if step >= masked:
                        x = keys[number]
                        assert x.all() and x.shape[1] == plan.block_n, label
                    elif lists.packed:
                        x = keys[number]
                        covered = all_in_parts(in_python, visited[step][1])
                        covered = covered[: x.shape[0], : x.shape[1]]
                        assert torch.equal(x, unmasked_keys[number] & covered), label
                if row.n_full + row.n_partial == 0:
                    assert features.empty_rows and plan.cut > 0, label
        assert len(row_tiles) == rows.shape[1] * 2
