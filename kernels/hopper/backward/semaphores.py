"""Semaphores of dq: programs add to a block in a fixed order, so gradients repeat bit for bit.

A counter in global memory holds, for each block of 128 queries or each row tile, the number of key
tiles that have added to it. Two warps of each program hide its latency: one waits ahead for the
counters of the next blocks, the other increments those that the groups have added to.

No deadlock: work indices are handed out in increasing order, and a program only waits for key tiles
with smaller work indices than its own. The smallest that is not done is therefore being processed,
and waits for nobody.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..block_list import number_of
from ..gluon import thread_barrier
from ..pipeline import arrive, phase_of, wait_empty, wait_full
from ..scheduler import load_scalar, make_scalars, peek, store_scalar
from .tiles import M, dq_rank, pop_work, row_tile_at, visit_at, work_of_head


class DqSemaphore(NamedTuple):
    """The next `plan.dq_stages` accesses of a program to blocks of dq, a ring: from the acquiring
    warp (`granted`) to the groups that add (`added`) to the releasing warp (`published`)."""

    # Sum of 1 if other key tiles add to the block before this one, 2 if others do after it, and 4
    # times the block. Written only if plan.posts_visits; otherwise the groups compute it
    visit: gl.shared_memory_descriptor
    granted: gl.shared_memory_descriptor
    added: gl.shared_memory_descriptor
    published: gl.shared_memory_descriptor


@gluon.jit
def make_dq_semaphore(groups: gl.constexpr, plan: gl.constexpr):
    """`DqSemaphore` of a program in which `groups` add to dq, each to its own columns."""
    AHEAD: gl.constexpr = plan.dq_stages
    layout: gl.constexpr = mbarrier.MBarrierLayout()
    visit = make_scalars(AHEAD)
    granted = gl.allocate_shared_memory(gl.int64, [AHEAD, 1], layout)
    added = gl.allocate_shared_memory(gl.int64, [AHEAD, 1], layout)
    published = gl.allocate_shared_memory(gl.int64, [AHEAD, 1], layout)
    for i in gl.static_range(AHEAD):
        mbarrier.init(granted.index(i), count=1)
        mbarrier.init(added.index(i), count=groups)
        mbarrier.init(published.index(i), count=1)
    return DqSemaphore(visit, granted, added, published)


@gluon.jit
def run_dq_semaphore(
    flags_ptr, shared, queue, order, call, ACQUIRE: gl.constexpr, plan: gl.constexpr
):
    """Body of the acquiring warp of a program, or of the releasing one.

    flags (heads, blocks, UNITS) int32 count the key tiles that have added. Both warps process the
    blocks in the order in which the groups visit them.
    """
    UNITS: gl.constexpr = plan.block // plan.dq_queries  # semaphores of a block
    semaphore = shared.dq_semaphore
    n_blocks = gl.cdiv(call.seq_q, plan.block)
    i = 0  # key tiles so far
    t = 0  # accesses so far
    work_index = peek(queue, i)
    while work_index < order.n_tiles * order.n_heads:
        work = pop_work(queue, i, work_index, order, call, plan)
        batch = work.batch_kv // (call.n_head // call.group)
        for h in range(call.group):
            head_blocks = (work.batch_kv * call.group + h) * n_blocks
            head = work.batch_kv % (call.n_head // call.group) * call.group + h
            head_work = work_of_head(work, head, h, call, plan)
            # Read one visit ahead, so that its load is done when it is needed.
            next_visit = visit_at(0, head_work, call, plan)
            for step in range((head_work.end - head_work.first) * UNITS):
                entry, schedule = next_visit
                block = number_of(entry, plan)
                next_visit = visit_at((step + 1) // UNITS, head_work, call, plan)
                flag = flags_ptr + ((head_blocks + block) * UNITS + step % UNITS)
                rank, last = dq_rank(block, schedule, head_work, batch, call, plan)
                slot = t % plan.dq_stages
                phase = phase_of(t, plan.dq_stages)
                if ACQUIRE:
                    # The slot is free when the groups have added in its last use. Then wait for
                    # the key tiles that add to this block before this one.
                    mbarrier.wait(semaphore.added.index(slot), phase ^ 1)
                    if rank > 0:
                        _wait_for_rank(flag, rank)
                    if plan.posts_visits:
                        number = (rank > 0) + 2 * (rank < last) + 4 * block
                        store_scalar(semaphore.visit.index(slot), number)
                    arrive(semaphore.granted, t)
                else:
                    # When the groups have added, let the next key tile have the block. The release
                    # makes their additions visible to the program that acquires this count.
                    mbarrier.wait(semaphore.added.index(slot), phase)
                    gl.atomic_xchg(flag, rank + 1, sem="release", scope="gpu")
                    arrive(semaphore.published, t)
                t += 1
        i += 1
        work_index = peek(queue, i)


@gluon.jit
def _wait_for_rank(flag, rank):
    """Wait until `rank` key tiles have added to the block of this flag."""
    # Poll with relaxed loads (atomic additions of 0), and acquire once at the end: an acquire
    # empties the L1 cache, which also holds the spilled registers.
    while gl.atomic_add(flag, 0, sem="acquire", scope="gpu") < rank:
        while gl.atomic_add(flag, 0, sem="relaxed", scope="gpu") < rank:
            pass


@gluon.jit
def acquire_dq(semaphore, t):
    """Wait until all earlier key tiles have added to the rows of access t of this program."""
    # The warp that arrives here has acquired the counter, so their additions are visible.
    wait_full(semaphore.granted, t)


@gluon.jit
def dq_row_tile(semaphore, t, step, work, batch, call, plan: gl.constexpr):
    """(row tile of a step; whether other key tiles add to it before this one; whether after it).

    Access t, in which the step is, must have been granted.
    """
    STEPS: gl.constexpr = plan.block // M
    if plan.posts_visits:
        visit = load_scalar(semaphore.visit.index(t % plan.dq_stages))
        if plan.has_block_list:
            row_tile = visit // 4 * STEPS + step % STEPS
        else:
            row_tile = row_tile_at(step, work, call, plan)
        return row_tile, visit % 2 > 0, visit % 4 > 1
    else:
        row_tile = row_tile_at(step, work, call, plan)
        rank, last = dq_rank(row_tile // STEPS, 0, work, batch, call, plan)
        return row_tile, rank > 0, rank < last


@gluon.jit
def release_dq(semaphore, t):
    """Let the next key tile have the block, as this group has added in access t."""
    # No group may arrive at `added` for a second round before the releasing warp has seen the
    # first.
    wait_empty(semaphore.published, t)
    thread_barrier()  # one thread arrives for all
    arrive(semaphore.added, t)
