"""The adder of the Hopper backward at 128 columns: one warp, which adds what the groups of keys
make of dq to its sums in memory, by the copy engine, in the turns of kernels/hopper/bwd_turns.py.

The groups leave a row tile of dq in shared memory and go on; they never wait for a turn, but where
the program is the last that adds to it: then they finish dq themselves, when the adder lets them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from kernels.hopper.bwd_turns import await_flag
from kernels.hopper.bwd_walk import BLOCK, M, key_tile_of, turn, visited_blocks
from kernels.hopper.gluon import fence_async_global, tma_add, tma_store, tma_writes_wait
from kernels.hopper.schedule import receive

ROWS = gl.constexpr(256)  # of 32 fp32: a row tile of sums, as the copy engine sees it


@gluon.jit
def add_parts(sums, flags_ptr, shared, box, order, call, plan: gl.constexpr):
    """Row tile after row tile: shared.part is empty for the groups, then full for the adder."""
    STEPS: gl.constexpr = BLOCK // M
    n_blocks = gl.cdiv(call.seq_q, BLOCK)
    i = 0  # key tiles so far
    c = 0  # row tiles so far
    ticket = receive(box, 0)
    while ticket < order.n_tiles * order.n_heads:
        key_tile, batch_kv = key_tile_of(ticket, order, plan)
        first, end = visited_blocks(key_tile, call, plan)
        for h in range(call.group):
            head_blocks = (batch_kv * call.group + h) * n_blocks
            for step in range((end - first) * STEPS):
                block = first + step // STEPS
                rank, last = turn(block, key_tile, call, plan)
                flag = flags_ptr + head_blocks + block
                waits = (rank > 0) & (step % STEPS == 0)
                if rank < last:
                    mbarrier.arrive(shared.part_empty, count=1)
                    if waits:
                        await_flag(flag, rank)
                        fence_async_global()
                    mbarrier.wait(shared.part_full, c & 1)
                    at = [((head_blocks + block) * STEPS + step % STEPS) * ROWS, 0]
                    if rank == 0:
                        tma_store(sums, at, shared.part)
                    else:
                        tma_add(sums, at, shared.part)
                    tma.store_wait(0)
                    if step % STEPS == STEPS - 1:
                        tma_writes_wait()
                        gl.atomic_xchg(flag, rank + 1, sem="release", scope="gpu")
                else:
                    if waits:
                        await_flag(flag, rank)
                    mbarrier.arrive(shared.part_empty, count=1)
                    mbarrier.wait(shared.part_full, c & 1)
                c += 1
        i += 1
        ticket = receive(box, i)
