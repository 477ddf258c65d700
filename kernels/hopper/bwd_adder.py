"""An adder of the Hopper backward at 128 columns: one warp, which adds what a group of keys makes
of dq to its sums in memory, by the copy engine, in the turns of kernels/hopper/bwd_turns.py.

The group leaves its part of a row tile in shared memory and goes on. It never waits for a turn, but
where the program is the last that adds to the row tile: then it finishes dq itself, when the adder
lets it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from kernels.hopper.bwd_turns import await_flag, flag_of
from kernels.hopper.bwd_walk import BLOCK, M, key_tile_of, turn, visited_blocks
from kernels.hopper.gluon import fence_async_global, tma_add, tma_store, tma_writes_wait
from kernels.hopper.schedule import receive

LINES = gl.constexpr(128)  # of 32 fp32: a part of the sums as the copy engine sees it


@gluon.jit
def add_parts(sums, flags_ptr, shared, box, order, call, cid: gl.constexpr, plan: gl.constexpr):
    """Row tile after row tile of group cid: its part is empty for the group, then full for this."""
    STEPS: gl.constexpr = BLOCK // M
    part = shared.part.index(cid)
    empty = shared.part_empty.index(cid)
    n_blocks = gl.cdiv(call.seq_q, BLOCK)
    i = 0  # key tiles so far
    c = 0  # row tiles so far
    walks = 0
    ticket = receive(box, 0)
    while ticket < order.n_tiles * order.n_heads:
        key_tile, batch_kv = key_tile_of(ticket, order, plan)
        batch = batch_kv // (call.n_head // call.group)
        first, end = visited_blocks(key_tile, batch, call, plan)
        for h in range(call.group):
            head_blocks = (batch_kv * call.group + h) * n_blocks
            n = (end - first) * STEPS
            for step in range(n):
                block = first + step // STEPS
                rank, last = turn(block, key_tile, batch, call, plan)
                flag = flag_of(flags_ptr, head_blocks + block) + cid
                waits = (rank > 0) & (step % STEPS == 0)
                if rank < last:
                    mbarrier.arrive(empty, count=1)
                    if waits:
                        await_flag(flag, rank)
                        fence_async_global()
                    _await_part(c, step == n - 1, walks, shared, cid, plan)
                    row_tile = (head_blocks + block) * STEPS + step % STEPS
                    at = [(2 * row_tile + cid) * LINES, 0]
                    if rank == 0:
                        tma_store(sums, at, part)
                    else:
                        tma_add(sums, at, part)
                    tma.store_wait(0)
                    if step % STEPS == STEPS - 1:
                        tma_writes_wait()
                        gl.atomic_xchg(flag, rank + 1, sem="release", scope="gpu")
                else:
                    if waits:
                        await_flag(flag, rank)
                    mbarrier.arrive(empty, count=1)
                    _await_part(c, step == n - 1, walks, shared, cid, plan)
                c += 1
            walks += 1
        i += 1
        ticket = receive(box, i)


@gluon.jit
def _await_part(c, last, walks, shared, cid: gl.constexpr, plan: gl.constexpr):
    """Wait for the part of the c-th row tile: it is there after the step that follows its own, or,
    the last of a walk, at the end."""
    STAGES: gl.constexpr = plan.stages
    done = shared.empty[cid].index((c + 1) % STAGES)
    mbarrier.wait(done, ((c + 1) // STAGES) & 1, pred=not last)
    mbarrier.wait(shared.part_last.index(cid), walks & 1, pred=last)
