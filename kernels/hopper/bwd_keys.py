"""A group of keys in the Hopper backward: four warps, which own dk and dv of 64 keys.

Scores lie transposed, (keys, queries): then p^T and ds^T are where wgmma reads its left operand,
and go into dv = p^T dout and dk = ds^T q without leaving the registers.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.hopper.bwd_dq import PANEL, add_dq
from kernels.hopper.bwd_turns import end_turn, place_in_turn, take_turn
from kernels.hopper.bwd_walk import (
    BLOCK,
    GROUP_N,
    M,
    N,
    group_view,
    key_tile_of,
    n_keys,
    place_in_walk,
    visited_blocks,
)
from kernels.hopper.gluon import exp2, log2, opaque, reinterpret, round_to, tma_store
from kernels.hopper.schedule import receive
from kernels.hopper.softmax import capped
from kernels.hopper.walk import doc_starts
from kernels.triton.primitives import dropout_head_key, dropout_keep
from kernels.triton.walks import visible_keys


@gluon.jit
def _rows(shared, stage, FIRST: gl.constexpr, S: gl.constexpr):
    """lse or delta of the queries of a stage: (1, M), in the threads that hold their columns."""
    numbers = shared.rows.index(stage).slice(FIRST, M).load(gl.SliceLayout(0, S))
    return gl.expand_dims(numbers, 0)


class View(NamedTuple):
    """The keys of a group, and the queries from which nothing of them is hidden."""

    start_n: gl.tensor
    batch: gl.tensor
    whole_from: gl.tensor
    whole_to: gl.tensor
    head_key: gl.tensor  # of dropout, for the query head at hand


@gluon.jit
def _masked_scores(s, start_m, view, call, plan: gl.constexpr):
    """s (keys, queries) with what a query does not see at -inf."""
    features: gl.constexpr = plan.features
    S: gl.constexpr = s.type.layout
    key = gl.expand_dims(view.start_n + gl.arange(0, GROUP_N, layout=gl.SliceLayout(1, S)), 1)
    query = start_m + gl.arange(0, M, layout=gl.SliceLayout(0, S))
    end = n_keys(view.batch, call, plan)
    lower, upper = visible_keys(query, end, call.seq_k - call.seq_q, call.window_size, features)
    seen = key < gl.expand_dims(upper, 0)
    if features.window or features.documents:
        if features.documents:
            lower = gl.maximum(lower, doc_starts(query, view.batch, call))
        seen = seen & (key >= gl.expand_dims(lower, 0))
    return gl.where(seen, s, -float("inf"))


@gluon.jit
def _hides(start_m, view, plan: gl.constexpr):
    """Whether something of the keys is hidden from a query of a row tile."""
    hides = start_m < view.whole_from
    if plan.features.window or plan.features.documents:
        hides = hides | (start_m + M > view.whole_to)
    return hides


@gluon.jit
def _keep(start_m, view, call, S: gl.constexpr):
    """Which probabilities (keys, queries) dropout keeps."""
    m = gl.expand_dims(gl.arange(0, M, layout=gl.SliceLayout(0, S)), 0)
    n = gl.expand_dims(gl.arange(0, GROUP_N, layout=gl.SliceLayout(1, S)), 1)
    return dropout_keep(view.head_key, start_m, m, view.start_n, n, call.threshold)


@gluon.jit
def _head_key(batch, head, call, plan: gl.constexpr):
    if plan.features.dropout:
        return dropout_head_key(call.seed_ptr, batch * call.n_head + head)
    else:
        return 0


@gluon.jit
def _store_ds(ds, c, shared, cid: gl.constexpr, plan: gl.constexpr):
    """Put the c-th ds of this group into shared memory, for those that make dq."""
    DS: gl.constexpr = plan.ds_stages
    stage = c % DS
    if plan.dq_group:
        mbarrier.wait(shared.ds_empty[cid].index(stage), ((c // DS) & 1) ^ 1)
    shared.ds.index(stage).slice(cid * GROUP_N, GROUP_N).store(ds)


@gluon.jit
def _share_ds(c, shared, cid: gl.constexpr, plan: gl.constexpr):
    """Let those that make dq have it."""
    fence_async_shared()
    mbarrier.arrive(shared.ds_full[cid].index(c % plan.ds_stages), count=1)


@gluon.jit
def _gradients(
    st, dv, v_t, c, start_m, view, shared, call,
    plan: gl.constexpr, S: gl.constexpr, O: gl.constexpr,
):  # fmt: skip
    """ds (keys, queries) of the row tile in stage c, whose scores st are on their way.

    Returns:
        (ds, the operand p of dv + p dout, which is under way, dv).
    """
    D: gl.constexpr = plan.block_d
    DTYPE: gl.constexpr = shared.q.dtype
    P: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    stage = c % plan.stages
    dout = shared.dout.index(stage).reshape([M, D])
    lse = _rows(shared, stage, 0, S)
    zero = gl.zeros([GROUP_N, M], gl.float32, layout=S)
    s = warpgroup_mma_wait(0, deps=(st,))
    dpt = warpgroup_mma(v_t, dout.permute((1, 0)), zero, use_acc=False, is_async=True)
    delta = _rows(shared, stage, M, S)
    s = capped(s, call, plan)
    if plan.masks and _hides(start_m, view, plan):
        s = _masked_scores(s, start_m, view, call, plan)
    p = exp2(s * call.scale_log2 - lse)
    kept = p
    if plan.features.dropout:
        # a dropped probability lives on below zero: its sign needs no further register
        p = gl.where(_keep(start_m, view, call, S), p, -p)
        kept = gl.where(p < 0.0, 0.0, p)
    pr = gl.convert_layout(round_to(kept, DTYPE), P)
    dv = warpgroup_mma(pr, dout, dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=(dpt,))
    if plan.features.dropout:
        dp = gl.where(p < 0.0, 0.0, dp * call.keep_scale)
        p = gl.abs(p)
    if plan.features.softcap:
        # what tanh was, from p, so that it needs no register in between; where p = 0 it is -1 here
        t = (log2(p) + _rows(shared, stage, 0, S)) * (1.0 / call.scale_log2)
        t = gl.minimum(gl.maximum(t, -1.0), 1.0)
        p *= 1.0 - t * t
    ds = round_to(p * (dp - delta), DTYPE)
    return ds, pr, dv


@gluon.jit
def _add_dk(dk, ds, c, shared, plan: gl.constexpr, O: gl.constexpr):
    """Issue dk + ds q; returns the operand ds too, which must live until the product is done."""
    q = shared.q.index(c % plan.stages).reshape([M, plan.block_d])
    dr = gl.convert_layout(ds, gl.DotOperandLayout(0, O, 2))
    return warpgroup_mma(dr, q, dk, is_async=True), dr


@gluon.jit
def _scores(k_t, c, there, shared, plan: gl.constexpr, S: gl.constexpr):
    """Issue the scores (keys, queries) of the row tile in stage c, if it is there or coming."""
    stage = c % plan.stages
    mbarrier.wait(shared.full.index(stage), (c // plan.stages) & 1, pred=there)
    q = shared.q.index(stage).reshape([M, plan.block_d]).permute((1, 0))
    zero = gl.zeros([GROUP_N, M], gl.float32, layout=S)
    return warpgroup_mma(k_t, q, zero, use_acc=False, is_async=True)


@gluon.jit
def _pass_over(c, shared, cid: gl.constexpr, plan: gl.constexpr, S: gl.constexpr):
    """Give back the stage of a row tile that the group does not see; its ds is 0."""
    stage = c % plan.stages
    mbarrier.wait(shared.full.index(stage), (c // plan.stages) & 1)
    if not plan.dq_group:
        _await_partner(c, False, shared, cid, plan)
    _store_ds(gl.zeros([GROUP_N, M], shared.q.dtype, layout=S), c, shared, cid, plan)
    _share_ds(c, shared, cid, plan)
    _finish_step(c, shared, cid, plan)


@gluon.jit
def _finish_step(c, shared, cid: gl.constexpr, plan: gl.constexpr):
    """The group is done with stage c of q and dout, and if it makes dq with the ds before."""
    mbarrier.arrive(shared.empty[cid].index(c % plan.stages), count=1)


@gluon.jit
def _put_dk_and_dv(dk, dv, dk_out, dv_out, at, shared, call, cid: gl.constexpr, plan: gl.constexpr):
    """Write dk and dv of the keys of group cid to the tiles at `at`."""
    D: gl.constexpr = plan.block_d
    if plan.features.dropout:
        dv *= call.keep_scale
    dk *= call.scale
    dv_tile = shared.out.index(2 * cid)
    dk_tile = shared.out.index(2 * cid + 1)
    tma.store_wait(0)
    dv_tile.reshape([GROUP_N, D]).store(round_to(dv, shared.q.dtype))
    dk_tile.reshape([GROUP_N, D]).store(round_to(dk, shared.q.dtype))
    fence_async_shared()
    tma_store(dv_out, at, dv_tile)
    tma_store(dk_out, at, dk_tile)


@gluon.jit
def own_keys(dk_out, dv_out, shared, box, order, call, cid: gl.constexpr, plan: gl.constexpr):
    """dk and dv of the keys of group cid, key tile after key tile; a third group makes dq."""
    D: gl.constexpr = plan.block_d
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    K: gl.constexpr = gl.DotOperandLayout(0, S, 2)
    STEPS: gl.constexpr = BLOCK // M
    kv_heads = call.n_head // call.group
    i = 0  # key tiles so far
    c = 0  # row tiles so far: stages of all rings
    ticket = receive(box, 0)
    while ticket < order.n_tiles * order.n_heads:
        key_tile, batch_kv, way = key_tile_of(ticket, order, plan)
        batch = batch_kv // kv_heads
        start_n = key_tile * N + cid * GROUP_N
        first, end = visited_blocks(key_tile, batch, call, plan)
        n = (end - first) * STEPS
        skipped, whole_from, whole_to = group_view(key_tile, cid, batch, way, call, plan)
        slot = i % plan.kv_stages
        mbarrier.wait(shared.kv_full.index(slot), (i // plan.kv_stages) & 1, pred=n > 0)
        k_t = shared.k.index(slot).reshape([N, D]).slice(cid * GROUP_N, GROUP_N)
        if plan.keys_in_registers:
            k_t = k_t.load(K)
        v_t = shared.v.index(slot).reshape([N, D]).slice(cid * GROUP_N, GROUP_N)
        dk = gl.zeros([GROUP_N, D], gl.float32, layout=O)
        dv = gl.zeros([GROUP_N, D], gl.float32, layout=O)
        for h in range(call.group):
            head = batch_kv % kv_heads * call.group + h
            head_key = _head_key(batch, head, call, plan)
            view = View(start_n, batch, whole_from, whole_to, head_key)
            if skipped > 0:
                _pass_over(c, shared, cid, plan, S)
                c += 1
            st = _scores(k_t, c, skipped < n, shared, plan, S)
            for step in range(skipped, n):
                row_tile = place_in_walk(step, first * STEPS, end * STEPS, way)
                ds, pr, dv = _gradients(
                    st, dv, v_t, c, row_tile * M, view, shared, call, plan, S, O
                )
                _store_ds(ds, c, shared, cid, plan)
                dk, dr = _add_dk(dk, ds, c, shared, plan, O)
                # of the next row tile; of the last one again, for the compiler's sake
                st = _scores(k_t, gl.where(step < n - 1, c + 1, c), True, shared, plan, S)
                _share_ds(c, shared, cid, plan)
                dv, dk, pr, dr = warpgroup_mma_wait(1, deps=(dv, dk, pr, dr))
                _finish_step(c, shared, cid, plan)
                c += 1
            st = warpgroup_mma_wait(0, deps=(st,))
        mbarrier.arrive(shared.kv_empty.index(slot), count=1, pred=n > 0)
        at = [batch, batch_kv % kv_heads, start_n, 0]
        _put_dk_and_dv(dk, dv, dk_out, dv_out, at, shared, call, cid, plan)
        i += 1
        ticket = receive(box, i)
    tma.store_wait(0)


# ---- 128 columns: the groups of keys make dq, too


@gluon.jit
def _tile(tiles, c, plan: gl.constexpr):
    """The only tile of keys or values in shared memory: (N, D).

    Its number is 0, but the compiler cannot tell. If it could, it would make all descriptors of
    the tile before the loop, and spill them: 48 registers.
    """
    return tiles.index(gl.minimum(c + 1, 0)).reshape([N, plan.block_d])


@gluon.jit
def _rows_of(tiles, c, cid: gl.constexpr, plan: gl.constexpr):
    return _tile(tiles, c, plan).slice(cid * GROUP_N, GROUP_N)


@gluon.jit
def _await_partner(c, there, shared, cid: gl.constexpr, plan: gl.constexpr):
    """Wait for the other group: until it is done with the last step, and with it no longer needs
    the ds that this group replaces in step c; and if `there`, until it has shared its last ds."""
    DS: gl.constexpr = plan.ds_stages
    stage = (c + 1) % DS  # of the last step, too: there are two
    phase = ((c - 1) // DS) & 1
    mbarrier.wait(shared.empty[1 - cid].index(stage), phase, pred=c > 0)
    mbarrier.wait(shared.ds_full[1 - cid].index(stage), phase, pred=there)


@gluon.jit
def _part_of_dq(c, shared, cid: gl.constexpr, plan: gl.constexpr, S: gl.constexpr):
    """Issue dq^T = k^T ds^T, 64 columns of it, for the ds of stage c."""
    stage = c % plan.ds_stages
    zero = gl.zeros([PANEL, M], gl.float32, layout=S)
    k_cols = _tile(shared.k, c, plan).slice(cid * PANEL, PANEL, dim=1).permute((1, 0))
    return warpgroup_mma(k_cols, shared.ds.index(stage), zero, use_acc=False, is_async=True)


@gluon.jit
def _put_dq(
    part, s, t, first, end, batch, head, key_tile, way, dq, sums_ptr, shared, call,
    cid: gl.constexpr, plan: gl.constexpr,
):  # fmt: skip
    """Add the part of the s-th row tile of a walk to what is there, in the turn of this program.

    Returns how many turns this group has had, which were t before.
    """
    STEPS: gl.constexpr = BLOCK // M
    if s % STEPS == 0:
        take_turn(shared.turns, t)
    row_tile = place_in_walk(s, first * STEPS, end * STEPS, way)
    before, after = place_in_turn(
        shared.turns, t, row_tile // STEPS, key_tile, batch, way, call, plan
    )
    tile = (batch * call.n_head + head) * (gl.cdiv(call.seq_q, BLOCK) * STEPS) + row_tile
    staging = reinterpret(shared.out.index(2 * cid), dq.dtype, [1, 1, M, PANEL], dq.layout)
    # were the tile not opaque, counters of the loop would be 64 bits wide, and registers spilled
    add_dq(
        part, sums_ptr + (2 * opaque(tile).to(gl.int64) + cid) * (M * PANEL), dq,
        [batch, head, row_tile * M, cid * PANEL], staging, before, after, call.scale,
    )  # fmt: skip
    if s % STEPS == STEPS - 1:
        end_turn(shared.turns, t)
        t += 1
    return t


@gluon.jit
def own_keys_and_dq(
    dq, dk_out, dv_out, sums_ptr, shared, box, order, call, cid: gl.constexpr, plan: gl.constexpr
):
    """dk and dv of the keys of group cid, and 64 columns of dq, of all keys of the program.

    dq of a row tile is made one step later than its ds, so that no group waits for the other.
    """
    D: gl.constexpr = plan.block_d
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    STEPS: gl.constexpr = BLOCK // M
    kv_heads = call.n_head // call.group
    i = 0  # key tiles so far
    c = 0  # row tiles so far: stages of all rings
    t = 0  # turns so far
    ticket = receive(box, 0)
    while ticket < order.n_tiles * order.n_heads:
        key_tile, batch_kv, way = key_tile_of(ticket, order, plan)
        batch = batch_kv // kv_heads
        start_n = key_tile * N + cid * GROUP_N
        first, end = visited_blocks(key_tile, batch, call, plan)
        n = (end - first) * STEPS
        skipped, whole_from, whole_to = group_view(key_tile, cid, batch, way, call, plan)
        slot = i % plan.kv_stages
        mbarrier.wait(shared.kv_full.index(slot), (i // plan.kv_stages) & 1, pred=n > 0)
        dk = gl.zeros([GROUP_N, D], gl.float32, layout=O)
        dv = gl.zeros([GROUP_N, D], gl.float32, layout=O)
        for h in range(call.group):
            head = batch_kv % kv_heads * call.group + h
            head_key = _head_key(batch, head, call, plan)
            view = View(start_n, batch, whole_from, whole_to, head_key)
            if skipped > 0:
                _pass_over(c, shared, cid, plan, S)
                c += 1
            st = _scores(_rows_of(shared.k, c, cid, plan), c, skipped < n, shared, plan, S)
            for step in range(skipped, n):
                row_tile = place_in_walk(step, first * STEPS, end * STEPS, way)
                v_t = _rows_of(shared.v, c, cid, plan)
                ds, pr, dv = _gradients(
                    st, dv, v_t, c, row_tile * M, view, shared, call, plan, S, O
                )
                _await_partner(c, step > 0, shared, cid, plan)
                _store_ds(ds, c, shared, cid, plan)
                part = _part_of_dq(c - 1, shared, cid, plan, S)
                dk, dr = _add_dk(dk, ds, c, shared, plan, O)
                _share_ds(c, shared, cid, plan)
                part, dv, pr = warpgroup_mma_wait(1, deps=(part, dv, pr))
                if step > 0:
                    t = _put_dq(
                        part, step - 1, t, first, end, batch, head, key_tile, way,
                        dq, sums_ptr, shared, call, cid, plan,
                    )  # fmt: skip
                # of the next row tile; of the last one again, for the compiler's sake
                k_t = _rows_of(shared.k, c, cid, plan)
                st = _scores(k_t, gl.where(step < n - 1, c + 1, c), True, shared, plan, S)
                dk, dr = warpgroup_mma_wait(1, deps=(dk, dr))
                _finish_step(c, shared, cid, plan)
                c += 1
            st = warpgroup_mma_wait(0, deps=(st,))
            if n > 0:
                _await_partner(c, True, shared, cid, plan)
                part = _part_of_dq(c - 1, shared, cid, plan, S)
                part = warpgroup_mma_wait(0, deps=(part,))
                t = _put_dq(
                    part, n - 1, t, first, end, batch, head, key_tile, way,
                    dq, sums_ptr, shared, call, cid, plan,
                )  # fmt: skip
        mbarrier.arrive(shared.kv_empty.index(slot), count=1, pred=n > 0)
        at = [batch, batch_kv % kv_heads, start_n, 0]
        _put_dk_and_dv(dk, dv, dk_out, dv_out, at, shared, call, cid, plan)
        i += 1
        ticket = receive(box, i)
    tma.store_wait(0)
