"""Producer of the backward pass: one warp that takes key tiles and loads what they need."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..block_list import number_of
from ..gluon import tma_load
from ..pipeline import arrive, wait_empty
from ..scheduler import finish, store_scalar
from .tiles import M, push_work, row_tile_at, work_of_head


@gluon.jit
def _load_keys(k, v, shared, i, batch, kv_head, key_tile, plan: gl.constexpr):
    """Load keys and values of the i-th key tile, once the groups have released the slot."""
    slot = i % plan.kv_stages
    full = shared.kv_full.index(slot)
    wait_empty(shared.kv_empty, i)
    mbarrier.expect(full, 2 * k.block_type.nbytes)
    at = [batch, kv_head, key_tile * plan.block, 0]
    tma_load(k, at, full, shared.k.index(slot))
    tma_load(v, at, full, shared.v.index(slot))


@gluon.jit
def produce(q, k, v, dout, row_stats, shared, queue, counter, order, call, plan: gl.constexpr):
    """Body of the producer: load key tiles, and the row tiles that see them, one per stage.

    A row tile is q, dout, and lse and delta of `row_stats`.
    """
    GROUPS: gl.constexpr = plan.groups
    STEPS: gl.constexpr = plan.block // M
    n_row_tiles = gl.cdiv(call.seq_q, plan.block) * STEPS
    kv_heads = call.n_head // call.group
    i = 0  # key tiles so far
    c = 0  # stages of the ring so far
    work_index = gl.atomic_add(counter, 1, sem="relaxed")
    work = push_work(queue, 0, work_index, order, call, plan)
    while work_index < order.n_tiles * order.n_heads:
        batch = work.batch_kv // kv_heads
        kv_head = work.batch_kv % kv_heads
        begin = c
        for h in range(call.group):
            head = kv_head * call.group + h
            row_tiles = (batch * call.n_head + head) * n_row_tiles
            head_work = work_of_head(work, head, h, call, plan)
            next_row_tile = row_tile_at(0, head_work, call, plan)
            for step in range((head_work.end - head_work.first) * STEPS):
                # Read one row tile ahead: the load of a block list then runs under the waits below.
                posted = next_row_tile
                row_tile = number_of(posted, plan)
                next_row_tile = row_tile_at(step + 1, head_work, call, plan)
                stage = c % plan.stages
                full = shared.full.index(stage)
                # Wait until all groups are done with what this stage held. Then `full` expects the
                # bytes of three copies, and flips when they have arrived.
                for cid in gl.static_range(GROUPS):
                    wait_empty(shared.empty[cid], c)
                if plan.has_block_list:
                    store_scalar(shared.row_tile.index(stage), posted)
                mbarrier.expect(full, 2 * q.block_type.nbytes + row_stats.block_type.nbytes)
                at = [batch, head, row_tile * M, 0]
                tma_load(q, at, full, shared.q.index(stage))
                stats_at = [(row_tiles + row_tile) * (2 * M)]
                tma_load(row_stats, stats_at, full, shared.row_stats.index(stage))
                tma_load(dout, at, full, shared.dout.index(stage))
                # Load keys and values behind the first row tile. Their slot may still be in use,
                # and the wait for it must not hold up that row tile.
                if c == begin:
                    _load_keys(k, v, shared, i, batch, kv_head, work.key_tile, plan)
                c += 1
        if c == begin:
            # No query attends to these keys (padding, for example). The groups count this key tile
            # all the same, so the phases of its slot have to advance.
            wait_empty(shared.kv_empty, i)
            arrive(shared.kv_full, i)
        i += 1
        # Take the next key tile when all loads of this one are issued. A program processes its work
        # indices in increasing order, on which the dq semaphores rely.
        work_index = gl.atomic_add(counter, 1, sem="relaxed")
        work = push_work(queue, i, work_index, order, call, plan)
    finish(counter, 1)
