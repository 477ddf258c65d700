"""Backward at 128 columns: a group of four warps computes dk and dv of 64 keys, and half of dq.

There are no registers for a third group that computes dq, as there is up to 64 columns.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ..gluon import opaque, reinterpret
from ..pipeline import arrive, phase_of, wait_full
from ..scheduler import peek
from . import mma
from .dq import PANEL, add_dq, dq_gemm
from .semaphores import acquire_dq, dq_row_tile, release_dq
from .tiles import GROUP_N, M, pop_work


@gluon.jit
def _group_rows(tiles, c, cid: gl.constexpr, plan: gl.constexpr):
    """Rows of group cid of the only tile of keys or values (`mma.tile_in_loop`)."""
    return mma.tile_in_loop(tiles, 0, c, plan).slice(cid * GROUP_N, GROUP_N)


@gluon.jit
def _wait_for_partner(c, there, shared, cid: gl.constexpr, plan: gl.constexpr):
    """Wait until the other group has finished step c - 1, and with it dq of step c - 2, whose ds is
    replaced in step c. If `there`, also wait for its ds of step c - 1, which dq needs next."""
    stage = (c + 1) % plan.ds_stages  # of step c - 1, as there are two stages
    phase = phase_of(c - 1, plan.ds_stages)
    mbarrier.wait(shared.empty[1 - cid].index(stage), phase, pred=c > 0)
    mbarrier.wait(shared.ds_full[1 - cid].index(stage), phase, pred=there)


@gluon.jit
def _accumulate_dq(
    part, s, t, work, batch, head, dq, sums_ptr, shared, call,
    cid: gl.constexpr, plan: gl.constexpr,
):  # fmt: skip
    """Add part to dq of the s-th row tile, in access t; return t of the next row tile."""
    STEPS: gl.constexpr = plan.block // M
    TILES: gl.constexpr = plan.dq_queries // M  # row tiles per access
    # One access covers TILES row tiles: acquire it before the first, release it after the last.
    if s % TILES == 0:
        acquire_dq(shared.dq_semaphore, t)
    row_tile, before, after = dq_row_tile(shared.dq_semaphore, t, s, work, batch, call, plan)
    tile = (batch * call.n_head + head) * (gl.cdiv(call.seq_q, plan.block) * STEPS) + row_tile
    # dq leaves through the tile of dv, which is not needed before the key tile ends.
    halves: gl.constexpr = [2 * shared.out.shape[0], 1, 1, M, PANEL]
    staging = reinterpret(shared.out, dq.dtype, halves, dq.layout).index(4 * cid)
    add_dq(
        part, sums_ptr + (2 * tile.to(gl.int64) + cid) * (M * PANEL), dq,
        [batch, head, row_tile * M, cid * PANEL], staging, before, after, call.scale,
    )  # fmt: skip
    if s % TILES == TILES - 1:
        release_dq(shared.dq_semaphore, t)
        t += 1
    return t


@gluon.jit
def compute_dkdv_dq(
    dq, dk_out, dv_out, sums_ptr, shared, queue, order, call, cid: gl.constexpr, plan: gl.constexpr
):
    """Body of group cid: compute dk and dv of its keys, and 64 columns of dq from all keys.

    dq of a row tile needs ds of both groups. It is computed one step later, so that neither group
    waits for the other.
    """
    D: gl.constexpr = plan.block_d
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    STEPS: gl.constexpr = plan.block // M
    kv_heads = call.n_head // call.group
    i = 0  # key tiles so far
    c = 0  # row tiles so far: stages of all rings
    t = 0  # accesses to dq so far
    work_index = peek(queue, 0)
    while work_index < order.n_tiles * order.n_heads:
        work = pop_work(queue, i, work_index, order, call, plan)
        keys, skipped, dk, dv = mma.begin_tile(work, i, kv_heads, shared, call, cid, plan, O)
        for h in range(call.group):
            head, head_work, view = mma.begin_head(work, keys, h, kv_heads, call, plan)
            n = (head_work.end - head_work.first) * STEPS
            skips = mma.head_skips(skipped, c, n, work.key_tile, shared, cid, call, plan)
            # Under a causal mask the first queries of a range may come before all keys of group 1.
            # Its zeros replace ds of step c - 2, so wait until the other group has read that.
            if skips > 0:
                wait_full(shared.full, c)
                _wait_for_partner(c, False, shared, cid, plan)
                mma.skip_row_tile(c, shared, cid, plan, S)
                c += 1
            # From here on k q^T of the next row tile is in flight at the top of the loop.
            st = mma.scores(_group_rows(shared.k, c, cid, plan), c, skips < n, shared, plan, S)
            for step in range(skips, n):
                row_tile = mma.row_tile_of(c, step, head_work, shared, call, plan)
                v_t = _group_rows(shared.v, c, cid, plan)
                # On return dv is in flight; ds is rounded, in registers.
                ds, pr, dv = mma.gradients(
                    st, dv, v_t, c, row_tile * M, view, shared, call, plan, S, O
                )
                # This ds replaces that of step c - 2: wait until the other group has read that.
                _wait_for_partner(c, step > 0, shared, cid, plan)
                mma.store_ds(ds, c, shared, cid, plan)
                # Issue dq of the step before ahead of dk, as it has to leave first. In step 0 the
                # result is not used, but the stage exists.
                part = dq_gemm(cid, 0, c + plan.ds_stages - 1, shared, plan, S)
                dk, dr = mma.add_dk(dk, ds, c, shared, plan, O)
                mma.share_ds(c, shared, cid, plan)
                # Wait for dv and dq. dk is in flight while dq is added to memory: it takes ds from
                # registers, and so leaves half of shared memory's bandwidth to the additions.
                part, dv, pr = hopper.warpgroup_mma_wait(1, deps=(part, dv, pr))
                if step > 0:
                    t = _accumulate_dq(
                        part, step - 1, t, head_work, view.batch, head,
                        dq, sums_ptr, shared, call, cid, plan,
                    )  # fmt: skip
                # Issue the next scores only now: next to them the additions to dq would wait.
                k_t = _group_rows(shared.k, c, cid, plan)
                st = mma.next_scores(k_t, c, step < n - 1, shared, plan, S)
                # Wait for all but the next scores: then q, dout and ds of the step before have been
                # read. This arrival also lets the other group replace that ds.
                dk, dr = hopper.warpgroup_mma_wait(1, deps=(dk, dr))
                arrive(shared.empty[cid], c)
                # Opaque: from a plain counter the compiler derives others, for addresses, and their
                # registers spill.
                c = opaque(c + 1)
            # The scores still in flight are not used, but they read shared memory until they end.
            st = hopper.warpgroup_mma_wait(0, deps=(st,))
            # dq of the last step has no later step to run in.
            if n > 0:
                _wait_for_partner(c, True, shared, cid, plan)
                part = dq_gemm(cid, 0, c - 1, shared, plan, S)
                part = hopper.warpgroup_mma_wait(0, deps=(part,))
                t = _accumulate_dq(
                    part, n - 1, t, head_work, view.batch, head,
                    dq, sums_ptr, shared, call, cid, plan,
                )  # fmt: skip
        arrive(shared.kv_empty, i)
        place = mma.dkdv_place(work, keys, kv_heads, order, plan)
        mma.store_dkdv(
            dk, dv, dk_out, dv_out, place,
            shared.out.index(2 * cid + 1), shared.out.index(2 * cid), call, cid, plan,
        )  # fmt: skip
        i += 1
        work_index = peek(queue, i)
    # Shared memory must outlive the last stores, which read it.
    tma.store_wait(0)
