"""A group of keys in the Hopper backward up to 64 columns: four warps own dk and dv of 64 keys."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma_wait

from ..pipeline import arrive, wait_full
from ..scheduler import peek
from .mma import (
    View,
    add_dk,
    await_rows,
    dropout_key,
    finish_step,
    gradients,
    head_skips,
    pass_over,
    put_dk_and_dv,
    row_tile_of,
    scores,
    share_ds,
    store_ds,
)
from .tiles import (
    GROUP_N,
    M,
    group_view,
    head_walk,
    piece_of,
    take_walk,
)


@gluon.jit
def own_keys(dk_out, dv_out, shared, box, order, call, cid: gl.constexpr, plan: gl.constexpr):
    """dk and dv of the keys of group cid, key tile after key tile; a third group makes dq."""
    D: gl.constexpr = plan.block_d
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    K: gl.constexpr = gl.DotOperandLayout(0, S, 2)
    STEPS: gl.constexpr = plan.block // M
    kv_heads = call.n_head // call.group
    i = 0  # key tiles so far
    c = 0  # row tiles so far: stages of all rings
    ticket = peek(box, 0)
    key_tile, batch_kv, way, first, end = take_walk(box, 0, ticket, order, call, plan)
    while ticket < order.n_tiles * order.n_heads:
        batch = batch_kv // kv_heads
        start_n = key_tile * plan.block + cid * GROUP_N
        skipped, whole_from, whole_to = group_view(
            key_tile, first, end, cid, batch, way, call, plan
        )
        slot = i % plan.kv_stages
        wait_full(shared.kv_full, i)
        k_t = shared.k.index(slot).reshape([plan.block, D]).slice(cid * GROUP_N, GROUP_N)
        if plan.keys_in_registers:
            k_t = k_t.load(K)
        v_t = shared.v.index(slot).reshape([plan.block, D]).slice(cid * GROUP_N, GROUP_N)
        dk = gl.zeros([GROUP_N, D], gl.float32, layout=O)
        dv = gl.zeros([GROUP_N, D], gl.float32, layout=O)
        for h in range(call.group):
            head = batch_kv % kv_heads * call.group + h
            head_key = dropout_key(batch, head, call, plan)
            view = View(start_n, batch, whole_from, whole_to, head_key, 0)
            h_first, h_end = head_walk(first, end, way, head, h, call, plan)
            n = (h_end - h_first) * STEPS
            skips = head_skips(skipped, c, n, key_tile, shared, cid, call, plan)
            if skips > 0:
                await_rows(c, True, shared, plan)
                pass_over(c, shared, cid, plan, S)
                c += 1
            st = scores(k_t, c, skips < n, shared, plan, S)
            for step in range(skips, n):
                row_tile = row_tile_of(c, step, h_first, h_end, way, shared, call, plan)
                ds, pr, dv = gradients(st, dv, v_t, c, row_tile * M, view, shared, call, plan, S, O)
                store_ds(ds, c, shared, cid, plan)
                dk, dr = add_dk(dk, ds, c, shared, plan, O)
                # of the next row tile; of the last one again, for the compiler's sake
                st = scores(k_t, gl.where(step < n - 1, c + 1, c), True, shared, plan, S)
                share_ds(c, shared, cid, plan)
                dv, dk, pr, dr = warpgroup_mma_wait(1, deps=(dv, dk, pr, dr))
                finish_step(c, shared, cid, plan)
                c += 1
            st = warpgroup_mma_wait(0, deps=(st,))
        arrive(shared.kv_empty, i)
        at = [batch, batch_kv % kv_heads, start_n, 0]
        piece = piece_of(way, batch_kv, order, plan)
        i += 1
        # read while dk and dv leave
        ticket = peek(box, i)
        key_tile, batch_kv, way, first, end = take_walk(box, i, ticket, order, call, plan)
        put_dk_and_dv(
            dk, dv, dk_out, dv_out, at, piece,
            shared.out.index(2 * cid + 1), shared.out.index(2 * cid), call, cid, plan,
        )  # fmt: skip
    tma.store_wait(0)
