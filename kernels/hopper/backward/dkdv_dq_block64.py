"""Backward under a mask in blocks of 64: one group of four warps computes dk, dv and all of dq.

Two groups, on blocks of 128, would waste half of their work: in a butterfly, most of these have two
visible quarters and two empty ones.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import tma

from ..block_list import number_of, parts_of
from ..gluon import reinterpret, thread_barrier
from ..pipeline import arrive
from ..scheduler import peek
from . import mma
from .dq import PANEL, add_dq, dq_gemm
from .semaphores import acquire_dq, dq_row_tile, release_dq
from .tiles import M, pop_work


@gluon.jit
def _add_part(
    part, panel: gl.constexpr, c, row_tile, before, after, batch, head,
    dq, sums_ptr, shared, call, plan: gl.constexpr,
):  # fmt: skip
    """Add 64 columns of dq to memory, through the stage of dout, which is free by then."""
    PANELS: gl.constexpr = plan.block_d // PANEL
    places = reinterpret(shared.dout, dq.dtype, [plan.stages * PANELS, 1, 1, M, PANEL], dq.layout)
    staging = places.index(c % plan.stages * PANELS + panel)
    tile = (batch * call.n_head + head) * gl.cdiv(call.seq_q, M) + row_tile
    sum_ptr = sums_ptr + (PANELS * tile.to(gl.int64) + panel) * (M * PANEL)
    at = [batch, head, row_tile * M, panel * PANEL]
    add_dq(part, sum_ptr, dq, at, staging, before, after, call.scale)


@gluon.jit
def compute_dkdv_dq_block64(
    dq, dk_out, dv_out, sums_ptr, shared, queue, order, call, plan: gl.constexpr
):
    """Body of the only group: compute dk, dv and all of dq of one block of keys after the other."""
    D: gl.constexpr = plan.block_d
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    PANELS: gl.constexpr = D // PANEL
    kv_heads = call.n_head // call.group
    i = 0  # blocks of keys so far
    c = 0  # row tiles so far: stages of the ring, and accesses to dq
    work_index = peek(queue, 0)
    while work_index < order.n_tiles * order.n_heads:
        work = pop_work(queue, i, work_index, order, call, plan)
        keys, _, dk, dv = mma.begin_tile(work, i, kv_heads, shared, call, 0, plan, O)
        slot = i % plan.kv_stages
        for h in range(call.group):
            head, head_work, view = mma.begin_head(work, keys, h, kv_heads, call, plan)
            n = head_work.end - head_work.first
            # From here on k q^T of the next row tile is in flight at the top of the loop.
            st = mma.scores(mma.tile_in_loop(shared.k, slot, c, plan), c, n > 0, shared, plan, S)
            for step in range(n):
                entry = mma.row_tile_of(c, step, head_work, shared, call, plan)
                row_tile, parts = number_of(entry, plan), parts_of(entry, plan)
                seen = mma.with_parts(view, parts)
                v_t = mma.tile_in_loop(shared.v, slot, c, plan)
                # On return dv is in flight; ds is rounded, in registers.
                ds, pr, dv = mma.gradients(
                    st, dv, v_t, c, row_tile * M, seen, shared, call, plan, S, O
                )
                # wgmma reads ds from shared memory for dq, and from registers for dk. There is one
                # stage of ds: its last product was done when the step before ended.
                mma.store_ds(ds, c, shared, 0, plan)
                hopper.fence_async_shared()
                part = dq_gemm(0, slot, c, shared, plan, S)
                dk, dr = mma.add_dk(dk, ds, c, shared, plan, O)
                # Wait for dv and the first columns of dq. dk is in flight during the acquire.
                part, dv, pr = hopper.warpgroup_mma_wait(1, deps=(part, dv, pr))
                acquire_dq(shared.dq_semaphore, c)
                thread_barrier()  # no warp's product reads dout any more: dq may take its place
                row_tile, before, after = dq_row_tile(
                    shared.dq_semaphore, c, step, head_work, view.batch, call, plan
                )
                for panel in gl.static_range(PANELS):
                    if panel > 0:
                        part = dq_gemm(panel, slot, c, shared, plan, S)
                        part, dk, dr = hopper.warpgroup_mma_wait(0, deps=(part, dk, dr))
                    if panel == PANELS - 1:
                        # Issue the next scores behind the last product of this row tile: they run
                        # under the additions to dq.
                        k_t = mma.tile_in_loop(shared.k, slot, c, plan)
                        st = mma.next_scores(k_t, c, step < n - 1, shared, plan, S)
                    _add_part(
                        part, panel, c, row_tile, before, after, view.batch, head,
                        dq, sums_ptr, shared, call, plan,
                    )  # fmt: skip
                # With two panels, dk has been waited for above.
                if PANELS == 1:
                    dk, dr = hopper.warpgroup_mma_wait(1, deps=(dk, dr))
                release_dq(shared.dq_semaphore, c)
                # Wait until the copy engine has read dq from the stage of dout. Then the producer
                # may fill that again.
                tma.store_wait(0)
                arrive(shared.empty[0], c)
                c += 1
            # The scores still in flight are not used, but they read shared memory until they end.
            st = hopper.warpgroup_mma_wait(0, deps=(st,))
        place = mma.dkdv_place(work, keys, kv_heads, order, plan)
        # dk and dv leave through the tiles of k and v, which behind this barrier no warp's product
        # reads any more.
        thread_barrier()
        mma.store_dkdv(
            dk, dv, dk_out, dv_out, place,
            shared.k.index(slot), shared.v.index(slot), call, 0, plan,
        )  # fmt: skip
        tma.store_wait(0)
        arrive(shared.kv_empty, i)
        i += 1
        work_index = peek(queue, i)
