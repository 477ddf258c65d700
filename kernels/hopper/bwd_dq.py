"""dq in the Hopper backward: dq^T = k^T ds^T for a row tile, added to what other programs found.

The first key tile to visit a block of queries stores its part in a sum in memory, in fp32 and in
the order in which wgmma leaves it; those between add theirs; the last adds the sum to its own part,
and what it has is dq. So nothing has to be set to zero before, or converted after.
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

from kernels.hopper.bwd_turns import end_turn, take_turn
from kernels.hopper.bwd_walk import (
    BLOCK,
    GROUP_N,
    M,
    N,
    group_steps,
    key_tile_of,
    turn,
    visited_blocks,
)
from kernels.hopper.gluon import round_to, tma_store
from kernels.hopper.schedule import receive
from kernels.triton.primitives import LN2

PANEL = gl.constexpr(64)  # columns of dq that a group makes


@gluon.jit
def add_dq(part, sum_ptr, dq, at, staging, rank, last, scale):
    """Add part (64 columns of dq, M queries) to a row tile of dq, or finish it.

    sum_ptr: of the tile's panel of the sums; dq: descriptor, `at` where in it the panel is.
    """
    S: gl.constexpr = part.type.layout
    # (4 warps, 2 halves, 8 rows) x (M / 8, 4 lanes, 2): a thread's neighbours, four of them, become
    # 16 bytes next to each other
    x = gl.reshape(part, [4, 2, 8, M // 8, 4, 2])
    x = gl.permute(x, (3, 0, 2, 4, 1, 5))
    x = gl.reshape(x, [PANEL * M])
    address = gl.multiple_of(sum_ptr, 16) + gl.arange(0, PANEL * M, layout=x.type.layout)
    if rank < last:
        if rank == 0:
            gl.store(address, x)
        else:
            gl.atomic_add(address, x, sem="relaxed")
    else:
        if rank > 0:
            x += gl.load(address, cache_modifier=".cg")
        y = gl.reshape(x, [M // 8, 4, 8, 4, 2, 2])
        y = gl.permute(y, (1, 4, 2, 0, 3, 5))
        y = gl.convert_layout(gl.reshape(y, [PANEL, M]), S, assert_trivial=True)
        tma.store_wait(0)
        staging.reshape([M, PANEL]).permute((1, 0)).store(round_to(y * scale, dq.dtype))
        fence_async_shared()
        tma_store(dq, at, staging)


@gluon.jit
def make_dq(dq, sums_ptr, shared, box, order, call, plan: gl.constexpr):
    """The group that makes dq of all 64 columns, from ds of both groups of keys."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    K: gl.constexpr = gl.DotOperandLayout(0, S, 2)
    STEPS: gl.constexpr = BLOCK // M
    DS: gl.constexpr = plan.ds_stages
    scale = call.scale_log2 * LN2
    zero = gl.zeros([PANEL, M], gl.float32, layout=S)
    kv_heads = call.n_head // call.group
    n_row_tiles = gl.cdiv(call.seq_q, BLOCK) * STEPS
    i = 0
    t = 0  # turns so far
    c0 = 0  # ds of each group so far
    c1 = 0
    ticket = receive(box, 0)
    while ticket < order.n_tiles * order.n_heads:
        key_tile, batch_kv = key_tile_of(ticket, order)
        first, end = visited_blocks(key_tile, call, plan)
        n = (end - first) * STEPS
        n1, _ = group_steps(key_tile, 1, call, plan)
        slot = i % plan.kv_stages
        mbarrier.wait(shared.kv_full.index(slot), (i // plan.kv_stages) & 1, pred=n > 0)
        keys = shared.k.index(slot).reshape([N, PANEL])
        k0 = keys.slice(0, GROUP_N).permute((1, 0)).load(K)
        k1 = keys.slice(GROUP_N, GROUP_N).permute((1, 0)).load(K)
        mbarrier.arrive(shared.kv_empty.index(slot), count=1, pred=n > 0)
        for h in range(call.group):
            head = batch_kv % kv_heads * call.group + h
            batch = batch_kv // kv_heads
            head_sums = sums_ptr + ((batch * call.n_head + head) * n_row_tiles).to(gl.int64) * (
                M * PANEL
            )
            for step in range(n):
                row_tile = end * STEPS - 1 - step
                rank, last = turn(row_tile // STEPS, key_tile, call, plan)
                stage = c0 % DS
                mbarrier.wait(shared.ds_full.index(2 * stage), (c0 // DS) & 1)
                part = warpgroup_mma(
                    k0, shared.ds.index(2 * stage), zero, use_acc=False, is_async=True
                )
                part = warpgroup_mma_wait(0, deps=(part,))
                mbarrier.arrive(shared.ds_empty.index(2 * stage), count=1)
                c0 += 1
                if step < n1:
                    stage = c1 % DS
                    mbarrier.wait(shared.ds_full.index(2 * stage + 1), (c1 // DS) & 1)
                    part = warpgroup_mma(k1, shared.ds.index(2 * stage + 1), part, is_async=True)
                    part = warpgroup_mma_wait(0, deps=(part,))
                    mbarrier.arrive(shared.ds_empty.index(2 * stage + 1), count=1)
                    c1 += 1
                if step % STEPS == 0:
                    take_turn(shared.turns, t)
                add_dq(
                    part, head_sums + row_tile.to(gl.int64) * (M * PANEL), dq,
                    [batch, head, row_tile * M, 0], shared.dq.index(0), rank, last, scale,
                )  # fmt: skip
                if step % STEPS == STEPS - 1:
                    end_turn(shared.turns, t)
                    t += 1
        i += 1
        ticket = receive(box, i)
    tma.store_wait(0)
