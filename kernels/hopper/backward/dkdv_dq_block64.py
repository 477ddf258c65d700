"""A group of keys in the Hopper backward under a mask in blocks of 64: four warps own dk and dv of
64 keys, and make all columns of dq.

Blocks of 128 would waste half of the work of two groups: of a butterfly most blocks that see each
other lie in pairs, and the other two of the four are empty.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..block_list import number_of, parts_of
from ..gluon import opaque, reinterpret, thread_barrier
from ..pipeline import arrive
from ..scheduler import peek
from .dq import PANEL, add_dq
from .mma import (
    add_dk,
    begin_head,
    begin_tile,
    finish_step,
    gradients,
    place_of_keys,
    put_dk_and_dv,
    row_tile_of,
    scores,
    store_ds,
    tile_in_loop,
    with_parts,
)
from .semaphores import end_turn, place_in_turn, take_turn
from .tiles import M, take_work


@gluon.jit
def _part_of_dq(panel: gl.constexpr, slot, c, shared, plan: gl.constexpr, S: gl.constexpr):
    """Issue dq^T = k^T ds^T, 64 columns of it."""
    zero = gl.zeros([PANEL, M], gl.float32, layout=S)
    k_cols = (
        tile_in_loop(shared.k, slot, c, plan).slice(panel * PANEL, PANEL, dim=1).permute((1, 0))
    )
    return warpgroup_mma(k_cols, shared.ds.index(0), zero, use_acc=False, is_async=True)


@gluon.jit
def _add_part(
    part, panel: gl.constexpr, c, row_tile, before, after, batch, head,
    dq, sums_ptr, shared, call, plan: gl.constexpr,
):  # fmt: skip
    """Add 64 columns of dq to what is there. They leave through the place of dout, which is free by
    then."""
    PANELS: gl.constexpr = plan.block_d // PANEL
    places = reinterpret(shared.dout, dq.dtype, [plan.stages * PANELS, 1, 1, M, PANEL], dq.layout)
    staging = places.index(c % plan.stages * PANELS + panel)
    tile = (batch * call.n_head + head) * gl.cdiv(call.seq_q, M) + row_tile
    # were the tile not opaque, counters of the loop would be 64 bits wide, and registers spilled
    sum_ptr = sums_ptr + (PANELS * opaque(tile).to(gl.int64) + panel) * (M * PANEL)
    at = [batch, head, row_tile * M, panel * PANEL]
    add_dq(part, sum_ptr, dq, at, staging, before, after, call.scale)


@gluon.jit
def own_block(dq, dk_out, dv_out, sums_ptr, shared, box, order, call, plan: gl.constexpr):
    """dk, dv and all parts of dq of a block of keys, block after block."""
    D: gl.constexpr = plan.block_d
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    PANELS: gl.constexpr = D // PANEL
    kv_heads = call.n_head // call.group
    i = 0  # blocks of keys so far
    c = 0  # row tiles so far: stages of the ring, and turns
    ticket = peek(box, 0)
    while ticket < order.n_tiles * order.n_heads:
        work = take_work(box, i, ticket, order, call, plan)
        keys, _, dk, dv = begin_tile(work, i, kv_heads, shared, call, 0, plan, O)
        slot = i % plan.kv_stages
        for h in range(call.group):
            head, own, view = begin_head(work, keys, h, kv_heads, call, plan)
            n = own.end - own.first
            st = scores(tile_in_loop(shared.k, slot, c, plan), c, n > 0, shared, plan, S)
            for step in range(n):
                listed = row_tile_of(c, step, own, shared, call, plan)
                row_tile, parts = number_of(listed, plan), parts_of(listed, plan)
                seen = with_parts(view, parts)
                v_t = tile_in_loop(shared.v, slot, c, plan)
                ds, pr, dv = gradients(st, dv, v_t, c, row_tile * M, seen, shared, call, plan, S, O)
                store_ds(ds, c, shared, 0, plan)
                fence_async_shared()
                part = _part_of_dq(0, slot, c, shared, plan, S)
                dk, dr = add_dk(dk, ds, c, shared, plan, O)
                part, dv, pr = warpgroup_mma_wait(1, deps=(part, dv, pr))
                take_turn(shared.turns, c, plan)
                thread_barrier()  # no warp's product reads dout any more
                row_tile, before, after = place_in_turn(
                    shared.turns, c, step, own, view.batch, call, plan
                )
                for panel in gl.static_range(PANELS):
                    if panel > 0:
                        part = _part_of_dq(panel, slot, c, shared, plan, S)
                        part, dk, dr = warpgroup_mma_wait(0, deps=(part, dk, dr))
                    if panel == PANELS - 1:
                        # of the next row tile; of the last one again, for the compiler's sake
                        k_t = tile_in_loop(shared.k, slot, c, plan)
                        st = scores(k_t, gl.where(step < n - 1, c + 1, c), True, shared, plan, S)
                    _add_part(
                        part, panel, c, row_tile, before, after, view.batch, head,
                        dq, sums_ptr, shared, call, plan,
                    )  # fmt: skip
                if PANELS == 1:
                    dk, dr = warpgroup_mma_wait(1, deps=(dk, dr))
                end_turn(shared.turns, c, plan)
                tma.store_wait(0)
                finish_step(c, shared, 0, plan)
                c += 1
            st = warpgroup_mma_wait(0, deps=(st,))
        place = place_of_keys(work, keys, kv_heads, order, plan)
        thread_barrier()
        # they leave through the places of keys and values, which no warp's product reads any more
        put_dk_and_dv(
            dk, dv, dk_out, dv_out, place,
            shared.k.index(slot), shared.v.index(slot), call, 0, plan,
        )  # fmt: skip
        tma.store_wait(0)
        arrive(shared.kv_empty, i)
        i += 1
        ticket = peek(box, i)
