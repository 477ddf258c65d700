"""Which key tiles are visited and masked, by the kernel's own arithmetic on numpy arrays.

Gluon has no interpreter. But walk.py only computes with whole numbers, so its functions run in
Python once `gl` is a stand-in. A program whose producer and groups disagreed about the ring would
wait for ever.
"""

import random
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

from kernels.hopper import tiles, walk
from kernels.hopper.tiles import ROWS, forward_plan
from kernels.triton import walks
from tests.kernels.hopper.in_python import GL, Number, Pointer, a_call, what_is_seen


@pytest.fixture
def in_python(monkeypatch):
    """The functions of walk.py, with those that they call, as plain Python."""
    monkeypatch.setattr(walks, "tl", GL)
    monkeypatch.setattr(walk, "gl", GL)
    monkeypatch.setattr(walk, "visible_keys", walks.visible_keys.fn)
    monkeypatch.setattr(walk, "M", ROWS)
    for name in ("SHORT_CAUSAL", "SHORT_FULL"):  # so that calls are of all plans
        monkeypatch.setattr(tiles, name, 300)
    for name in ("row_bounds", "doc_starts", "_doc_range", "row_tile_keys", "group_tiles"):
        monkeypatch.setattr(walk, name, getattr(walk, name).fn)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_groups_visit_what_is_loaded_and_mask_what_is_hidden(head_dim, seed, in_python):
    draw = random.Random(seed)
    for _ in range(200):
        seq_q, seq_k, features, window_size, doc_start, kv_lengths = a_call(draw)
        plan = forward_plan.__wrapped__(head_dim, seq_q, seq_k, features)
        call = SimpleNamespace(
            seq_q=seq_q, seq_k=seq_k, window_size=window_size,
            doc_ptr=Pointer(doc_start), lengths_ptr=Pointer(kv_lengths),
        )  # fmt: skip
        visible = what_is_seen(seq_q, seq_k, features, window_size, doc_start, kv_lengths)
        batch = Number(0)
        for start in range(0, seq_q, plan.groups * ROWS):
            first, end = walk.row_tile_keys(start, batch, call, plan)
            for cid in range(plan.groups):
                skipped, last, high, whole, low = walk.group_tiles(start, cid, batch, call, plan)
                said = (seq_q, seq_k, plan, start, cid)
                assert min(skipped, high, whole, low) >= 0, said
                assert skipped + 1 + high + whole + low == end - first, said
                assert last == end - 1 - skipped, said
                # a group holds one stage while it waits for those that it passes over
                assert skipped < plan.stages, said
                # groups that take turns have as many
                assert not (skipped and plan.turns), said
                # what is not compiled has nothing to do
                assert not (skipped and not plan.skips), said
                assert not (high and plan.cut < 2) and not (low and not plan.low), said
                keys = visible[start + cid * ROWS :][:ROWS].split(plan.block_n, dim=1)
                unmasked = set(range(last - high - whole, last - high))
                if plan.cut == 0 and not plan.low:
                    unmasked.add(last)
                for tile, seen in enumerate(keys):
                    if not first <= tile <= last:
                        assert not seen.any(), said
                    if tile in unmasked:
                        assert seen.all() and seen.shape[1] == plan.block_n, said
                assert not unmasked or max(unmasked) < len(keys), said
