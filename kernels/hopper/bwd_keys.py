"""A group of keys in the Hopper backward: four warps, which own dk and dv of 64 keys.

Scores lie transposed, (keys, queries): then p^T and ds^T are where wgmma reads its left operand,
and go into dv = p^T dout and dk = ds^T q without leaving the registers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.hopper.bwd_walk import BLOCK, GROUP_N, M, N, group_steps, key_tile_of, visited_blocks
from kernels.hopper.gluon import exp2, round_to, tma_store
from kernels.hopper.schedule import receive
from kernels.triton.primitives import LN2


@gluon.jit
def _rows(shared, stage, FIRST: gl.constexpr, S: gl.constexpr):
    """lse or delta of the queries of a stage: (1, M), in the threads that hold their columns."""
    numbers = shared.rows.index(stage).slice(FIRST, M).load(gl.SliceLayout(0, S))
    return gl.expand_dims(numbers, 0)


@gluon.jit
def _hidden(s, start_m, start_n, call, plan: gl.constexpr):
    """s (keys, queries) with what a query does not see at -inf."""
    S: gl.constexpr = s.type.layout
    key = start_n + gl.arange(0, GROUP_N, layout=gl.SliceLayout(1, S))
    upper = call.seq_k
    if plan.features.causal:
        query = start_m + gl.arange(0, M, layout=gl.SliceLayout(0, S))
        upper = gl.minimum(query + (call.seq_k - call.seq_q + 1), call.seq_k)
        upper = gl.expand_dims(upper, 0)
    return gl.where(gl.expand_dims(key, 1) < upper, s, -float("inf"))


@gluon.jit
def _step(
    st, dk, dv, k_t, v_t, c, j, row_tile, whole_from, start_n, more, shared, call,
    cid: gl.constexpr, plan: gl.constexpr, S: gl.constexpr, O: gl.constexpr,
):  # fmt: skip
    """One row tile: st is its scores, on their way. Returns those of the next, if there is more."""
    D: gl.constexpr = plan.block_d
    DTYPE: gl.constexpr = shared.q.dtype
    STAGES: gl.constexpr = plan.stages
    DS: gl.constexpr = plan.ds_stages
    P: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    stage = c % STAGES
    q = shared.q.index(stage).reshape([M, D])
    dout = shared.dout.index(stage).reshape([M, D])
    lse = _rows(shared, stage, 0, S)
    zero = gl.zeros([GROUP_N, M], gl.float32, layout=S)
    s = warpgroup_mma_wait(0, deps=(st,))
    dpt = warpgroup_mma(v_t, dout.permute((1, 0)), zero, use_acc=False, is_async=True)
    delta = _rows(shared, stage, M, S)
    if plan.masks and row_tile * M < whole_from:
        s = _hidden(s, row_tile * M, start_n, call, plan)
    p = exp2(s * call.scale_log2 - lse)
    pr = gl.convert_layout(round_to(p, DTYPE), P)
    dv = warpgroup_mma(pr, dout, dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=(dpt,))
    ds = round_to(p * (dp - delta), DTYPE)
    dr = gl.convert_layout(ds, P)
    dk = warpgroup_mma(dr, q, dk, is_async=True)
    next_c = gl.where(more, c + 1, c)
    next_stage = next_c % STAGES
    mbarrier.wait(shared.full.index(next_stage), (next_c // STAGES) & 1)
    next_q = shared.q.index(next_stage).reshape([M, D]).permute((1, 0))
    st = warpgroup_mma(k_t, next_q, zero, use_acc=False, is_async=True)
    slot = j % DS
    mbarrier.wait(shared.ds_empty.index(2 * slot + cid), ((j // DS) & 1) ^ 1)
    shared.ds.index(2 * slot + cid).store(ds)
    fence_async_shared()
    mbarrier.arrive(shared.ds_full.index(2 * slot + cid), count=1)
    dv, dk, pr, dr = warpgroup_mma_wait(1, deps=(dv, dk, pr, dr))
    mbarrier.arrive(shared.empty.index(stage), count=1)
    return st, dk, dv


@gluon.jit
def own_keys(dk_out, dv_out, shared, box, order, call, cid: gl.constexpr, plan: gl.constexpr):
    """dk and dv of the keys of group cid, key tile after key tile."""
    D: gl.constexpr = plan.block_d
    DTYPE: gl.constexpr = shared.q.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    K: gl.constexpr = gl.DotOperandLayout(0, S, 2)
    STAGES: gl.constexpr = plan.stages
    STEPS: gl.constexpr = BLOCK // M
    scale = call.scale_log2 * LN2
    kv_heads = call.n_head // call.group
    zero = gl.zeros([GROUP_N, M], gl.float32, layout=S)
    i = 0  # key tiles so far
    c = 0  # stages of the ring so far
    j = 0  # ds so far
    ticket = receive(box, 0)
    while ticket < order.n_tiles * order.n_heads:
        key_tile, batch_kv = key_tile_of(ticket, order)
        start_n = key_tile * N + cid * GROUP_N
        first, end = visited_blocks(key_tile, call, plan)
        n = (end - first) * STEPS
        own, whole_from = group_steps(key_tile, cid, call, plan)
        slot = i % plan.kv_stages
        mbarrier.wait(shared.kv_full.index(slot), (i // plan.kv_stages) & 1, pred=n > 0)
        k_t = shared.k.index(slot).reshape([N, D]).slice(cid * GROUP_N, GROUP_N)
        if plan.keys_in_registers:
            k_t = k_t.load(K)
        v_t = shared.v.index(slot).reshape([N, D]).slice(cid * GROUP_N, GROUP_N)
        dk = gl.zeros([GROUP_N, D], gl.float32, layout=O)
        dv = gl.zeros([GROUP_N, D], gl.float32, layout=O)
        for _ in range(call.group):
            stage = c % STAGES
            mbarrier.wait(shared.full.index(stage), (c // STAGES) & 1, pred=n > 0)
            q_t = shared.q.index(stage).reshape([M, D]).permute((1, 0))
            st = warpgroup_mma(k_t, q_t, zero, use_acc=False, is_async=True)
            for step in range(own):
                st, dk, dv = _step(
                    st, dk, dv, k_t, v_t, c, j, end * STEPS - 1 - step, whole_from, start_n,
                    step < own - 1, shared, call, cid, plan, S, O,
                )  # fmt: skip
                c += 1
                j += 1
            st = warpgroup_mma_wait(0, deps=(st,))
            for _ in range(n - own):
                stage = c % STAGES
                mbarrier.wait(shared.full.index(stage), (c // STAGES) & 1)
                mbarrier.arrive(shared.empty.index(stage), count=1)
                c += 1
        mbarrier.arrive(shared.kv_empty.index(slot), count=1, pred=n > 0)
        at = [batch_kv // kv_heads, batch_kv % kv_heads, start_n, 0]
        tma.store_wait(0)
        shared.out.index(2 * cid).reshape([GROUP_N, D]).store(round_to(dv, DTYPE))
        shared.out.index(2 * cid + 1).reshape([GROUP_N, D]).store(round_to(dk * scale, DTYPE))
        fence_async_shared()
        tma_store(dv_out, at, shared.out.index(2 * cid))
        tma_store(dk_out, at, shared.out.index(2 * cid + 1))
        i += 1
        ticket = receive(box, i)
    tma.store_wait(0)
