"""The producer of the Hopper backward: one warp, which draws key tiles and loads what they need."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..block_list import number_of
from ..gluon import tma_load
from ..pipeline import arrive, wait_empty
from ..scheduler import finish, post_number
from .tiles import (
    M,
    head_work,
    post_work,
    row_tile_at,
)


@gluon.jit
def _load_keys(k, v, shared, i, batch, kv_head, key_tile, plan: gl.constexpr):
    slot = i % plan.kv_stages
    full = shared.kv_full.index(slot)
    wait_empty(shared.kv_empty, i)
    mbarrier.expect(full, 2 * k.block_type.nbytes)
    at = [batch, kv_head, key_tile * plan.block, 0]
    tma_load(k, at, full, shared.k.index(slot))
    tma_load(v, at, full, shared.v.index(slot))


@gluon.jit
def produce_rows(q, k, v, dout, rows, shared, box, counter, order, call, plan: gl.constexpr):
    """Draw key tiles, load their keys and values, and walk over the queries that see them."""
    GROUPS: gl.constexpr = plan.groups
    STEPS: gl.constexpr = plan.block // M
    n_row_tiles = gl.cdiv(call.seq_q, plan.block) * STEPS
    kv_heads = call.n_head // call.group
    i = 0  # key tiles so far
    c = 0  # stages of the ring so far
    ticket = gl.atomic_add(counter, 1, sem="relaxed")
    work = post_work(box, 0, ticket, order, call, plan)
    while ticket < order.n_tiles * order.n_heads:
        batch = work.batch_kv // kv_heads
        kv_head = work.batch_kv % kv_heads
        begin = c
        for h in range(call.group):
            head = kv_head * call.group + h
            row_tiles = (batch * call.n_head + head) * n_row_tiles
            own = head_work(work, head, h, call, plan)
            next_row_tile = row_tile_at(0, own, call, plan)
            for step in range((own.end - own.first) * STEPS):
                posted = next_row_tile
                row_tile = number_of(posted, plan)
                next_row_tile = row_tile_at(step + 1, own, call, plan)
                stage = c % plan.stages
                full = shared.full.index(stage)
                for cid in gl.static_range(GROUPS):
                    wait_empty(shared.empty[cid], c)
                if plan.listed:
                    post_number(shared.row_tile.index(stage), posted)
                mbarrier.expect(full, 2 * q.block_type.nbytes + rows.block_type.nbytes)
                at = [batch, head, row_tile * M, 0]
                tma_load(q, at, full, shared.q.index(stage))
                tma_load(rows, [(row_tiles + row_tile) * (2 * M)], full, shared.rows.index(stage))
                tma_load(dout, at, full, shared.dout.index(stage))
                if c == begin:
                    _load_keys(k, v, shared, i, batch, kv_head, work.key_tile, plan)
                c += 1
        if c == begin:
            # Nobody sees these keys, as they are padding, say. The phases of their slot go on all
            # the same: they are counted by key tiles.
            wait_empty(shared.kv_empty, i)
            arrive(shared.kv_full, i)
        i += 1
        ticket = gl.atomic_add(counter, 1, sem="relaxed")
        work = post_work(box, i, ticket, order, call, plan)
    finish(counter, 1)
