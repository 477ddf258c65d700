"""Backward up to 64 columns: a group of four warps computes dk and dv of 64 keys."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma_wait

from ..pipeline import arrive, wait_full
from ..scheduler import peek
from . import mma
from .tiles import GROUP_N, M, pop_work


@gluon.jit
def compute_dkdv(dk_out, dv_out, shared, queue, order, call, cid: gl.constexpr, plan: gl.constexpr):
    """Body of group cid of keys: compute dk and dv of one key tile after the other.

    A third group computes dq from the ds of both (`compute_dq`).
    """
    D: gl.constexpr = plan.block_d
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    K: gl.constexpr = gl.DotOperandLayout(0, S, 2)
    STEPS: gl.constexpr = plan.block // M
    kv_heads = call.n_head // call.group
    i = 0  # key tiles so far
    c = 0  # row tiles so far: stages of all rings
    work_index = peek(queue, 0)
    work = pop_work(queue, 0, work_index, order, call, plan)
    while work_index < order.n_tiles * order.n_heads:
        keys, skipped, dk, dv = mma.begin_tile(work, i, kv_heads, shared, call, cid, plan, O)
        slot = i % plan.kv_stages
        k_t = shared.k.index(slot).reshape([plan.block, D]).slice(cid * GROUP_N, GROUP_N)
        # Shared memory is nearly as busy as the tensor cores. Keys in registers save it a read in
        # each step.
        if plan.keys_in_registers:
            k_t = k_t.load(K)
        v_t = shared.v.index(slot).reshape([plan.block, D]).slice(cid * GROUP_N, GROUP_N)
        for h in range(call.group):
            _, head_work, view = mma.begin_head(work, keys, h, kv_heads, call, plan)
            n = (head_work.end - head_work.first) * STEPS
            skips = mma.head_skips(skipped, c, n, work.key_tile, shared, cid, call, plan)
            # Under a causal mask the first queries of a range may come before all keys of group 1.
            if skips > 0:
                wait_full(shared.full, c)
                mma.skip_row_tile(c, shared, cid, plan, S)
                c += 1
            # From here on k q^T of the next row tile is in flight at the top of the loop.
            st = mma.scores(k_t, c, skips < n, shared, plan, S)
            for step in range(skips, n):
                row_tile = mma.row_tile_of(c, step, head_work, shared, call, plan)
                # On return dv is in flight; ds is rounded, in registers.
                ds, pr, dv = mma.gradients(
                    st, dv, v_t, c, row_tile * M, view, shared, call, plan, S, O
                )
                # The dq group reads ds from shared memory, dk takes it from registers. Store it
                # first: behind dk its stores would wait for the reads of that product.
                mma.store_ds(ds, c, shared, cid, plan)
                dk, dr = mma.add_dk(dk, ds, c, shared, plan, O)
                # Behind dk issue the scores of the next row tile: the next step begins with them.
                st = mma.next_scores(k_t, c, step < n - 1, shared, plan, S)
                mma.share_ds(c, shared, cid, plan)
                # Wait for all but the next scores: then q and dout of this stage have been read.
                dv, dk, pr, dr = warpgroup_mma_wait(1, deps=(dv, dk, pr, dr))
                arrive(shared.empty[cid], c)
                c += 1
            # The scores still in flight are not used, but they read shared memory until they end.
            st = warpgroup_mma_wait(0, deps=(st,))
        arrive(shared.kv_empty, i)
        place = mma.dkdv_place(work, keys, kv_heads, order, plan)
        i += 1
        # Look up the next key tile first: the loads that this takes run while dk and dv are stored.
        work_index = peek(queue, i)
        work = pop_work(queue, i, work_index, order, call, plan)
        mma.store_dkdv(
            dk, dv, dk_out, dv_out, place,
            shared.out.index(2 * cid + 1), shared.out.index(2 * cid), call, cid, plan,
        )  # fmt: skip
    # Shared memory must outlive the last stores, which read it.
    tma.store_wait(0)
