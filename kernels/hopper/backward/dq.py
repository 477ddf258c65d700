"""dq of the backward pass: dq^T = k^T ds^T of a row tile, accumulated across programs in fp32.

The first key tile to visit a block of queries stores its part in a buffer in memory, in the layout
in which wgmma leaves it; those between add theirs; the last adds the buffer to its own part, and
the result is dq. So no buffer has to be zeroed beforehand, or converted afterwards.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ..gluon import discard_lines, round_to, tma_store
from ..pipeline import arrive, phase_of, wait_full
from ..scheduler import peek
from .mma import tile_in_loop
from .semaphores import acquire_dq, dq_row_tile, release_dq
from .tiles import GROUP_N, M, pop_work, work_of_head

PANEL = gl.constexpr(64)  # columns of dq in one product
LINE = gl.constexpr(32)  # fp32 numbers in a cache line


@gluon.jit
def dq_gemm(panel: gl.constexpr, slot, c, shared, plan: gl.constexpr, S: gl.constexpr):
    """Issue 64 columns of dq^T = k^T ds^T, for the ds of stage c, in a loop over c."""
    stage = c % plan.ds_stages
    zero = gl.zeros([PANEL, M], gl.float32, layout=S)
    k_cols = tile_in_loop(shared.k, slot, c, plan).slice(panel * PANEL, PANEL, dim=1)
    k_t = k_cols.permute((1, 0))
    return hopper.warpgroup_mma(k_t, shared.ds.index(stage), zero, use_acc=False, is_async=True)


@gluon.jit
def _in_rows(part):
    """Flatten part (64 columns, M queries), in the layout of wgmma, to 64 * M numbers.

    Each thread then holds runs of four: 16 bytes of memory per instruction.
    """
    # (4 warps, 2 halves, 8 rows) x (M / 8, 4 lanes, 2)
    x = gl.reshape(part, [4, 2, 8, M // 8, 4, 2])
    x = gl.permute(x, (3, 0, 2, 4, 1, 5))
    return gl.reshape(x, [PANEL * M])


@gluon.jit
def _addresses(sum_ptr, x):
    return sum_ptr + gl.arange(0, PANEL * M, layout=x.type.layout)


@gluon.jit
def _finish_dq(x, dq, at, staging, scale):
    """Store the complete sum x, flat as of `_in_rows`, to dq at `at`, (M, 64), through staging."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    y = gl.reshape(x, [M // 8, 4, 8, 4, 2, 2])
    y = gl.permute(y, (1, 4, 2, 0, 3, 5))
    y = gl.convert_layout(gl.reshape(y, [PANEL, M]), S, assert_trivial=True)
    # The copy engine may still be reading what was there before.
    tma.store_wait(0)
    staging.reshape([M, PANEL]).permute((1, 0)).store(round_to(y * scale, dq.dtype))
    hopper.fence_async_shared()
    tma_store(dq, at, staging)


@gluon.jit
def add_dq(part, sum_ptr, dq, at, staging, before, after, scale):
    """Add part to a row tile of dq: to its sum if others add `after` this program, else finish dq.

    The sum exists if others have added `before`.
    """
    x = _in_rows(part)
    if after:
        address = _addresses(sum_ptr, x)
        # The semaphore admits one program at a time, so the order of additions is fixed. They are
        # atomic only so that the L2 cache adds, and nothing has to be read.
        if before:
            gl.atomic_add(address, x, sem="relaxed")
        else:
            # The others find it in the L2 cache, where it should stay.
            gl.store(address, x, eviction_policy="evict_last")
    else:
        if before:
            # Read from the L2 cache, where the sums of other programs are visible.
            x = x + gl.load(_addresses(sum_ptr, x), cache_modifier=".cg")
        _finish_dq(x, dq, at, staging, scale)
        # Nobody needs the sum any more, so it need not be written to memory. All threads have read
        # it, because a barrier precedes the store of dq.
        if before:
            layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
            discard_lines(sum_ptr + LINE * gl.arange(0, PANEL * M // LINE, layout=layout))


@gluon.jit
def compute_dq(dq, sums_ptr, shared, queue, order, call, plan: gl.constexpr):
    """Body of the dq group: compute all 64 columns of dq from ds of both groups of keys."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    K: gl.constexpr = gl.DotOperandLayout(0, S, 2)
    STEPS: gl.constexpr = plan.block // M
    TILES: gl.constexpr = plan.dq_queries // M  # row tiles per access
    zero = gl.zeros([PANEL, M], gl.float32, layout=S)
    kv_heads = call.n_head // call.group
    n_row_tiles = gl.cdiv(call.seq_q, plan.block) * STEPS
    i = 0  # key tiles so far
    t = 0  # accesses to dq so far
    c = 0  # row tiles so far
    work_index = peek(queue, 0)
    while work_index < order.n_tiles * order.n_heads:
        work = pop_work(queue, i, work_index, order, call, plan)
        batch = work.batch_kv // kv_heads
        slot = i % plan.kv_stages
        wait_full(shared.kv_full, i)
        # Keep k^T in registers for all row tiles, and release its tile at once.
        keys = shared.k.index(slot).reshape([plan.block, PANEL])
        k0 = keys.slice(0, GROUP_N).permute((1, 0)).load(K)
        k1 = keys.slice(GROUP_N, GROUP_N).permute((1, 0)).load(K)
        arrive(shared.kv_empty, i)
        for h in range(call.group):
            head = work.batch_kv % kv_heads * call.group + h
            row_tiles = (batch * call.n_head + head) * n_row_tiles
            head_sums = sums_ptr + row_tiles.to(gl.int64) * (M * PANEL)
            head_work = work_of_head(work, head, h, call, plan)
            for step in range((head_work.end - head_work.first) * STEPS):
                stage = c % plan.ds_stages
                phase = phase_of(c, plan.ds_stages)
                # Multiply the ds of each group as soon as it is there.
                ds = shared.ds.index(stage)
                mbarrier.wait(shared.ds_full[0].index(stage), phase)
                ds0, ds1 = ds.slice(0, GROUP_N), ds.slice(GROUP_N, GROUP_N)
                part = hopper.warpgroup_mma(k0, ds0, zero, use_acc=False, is_async=True)
                mbarrier.wait(shared.ds_full[1].index(stage), phase)
                part = hopper.warpgroup_mma(k1, ds1, part, is_async=True)
                part = hopper.warpgroup_mma_wait(0, deps=(part,))
                # Release ds ahead of the semaphore: the groups of keys then do not wait for other
                # programs.
                arrive(shared.ds_empty[0], c)
                arrive(shared.ds_empty[1], c)
                c += 1
                # Wait for the earlier key tiles of this block, add, and let the next one have it.
                if step % TILES == 0:
                    acquire_dq(shared.dq_semaphore, t)
                row_tile, before, after = dq_row_tile(
                    shared.dq_semaphore, t, step, head_work, batch, call, plan
                )
                add_dq(
                    part, head_sums + row_tile.to(gl.int64) * (M * PANEL), dq,
                    [batch, head, row_tile * M, 0], shared.out.index(4), before, after,
                    call.scale,
                )  # fmt: skip
                if step % TILES == TILES - 1:
                    release_dq(shared.dq_semaphore, t)
                    t += 1
        i += 1
        work_index = peek(queue, i)
    # Shared memory must outlive the last store, which reads it.
    tma.store_wait(0)
