"""Ring buffers in shared memory, through which the roles of a program pass tiles to each other.

Both sides of a ring count its uses, c = 0, 1, 2, ...: use c is in stage c % stages, in round
c // stages. Each stage has two mbarriers. The writer arrives at `full`, which also counts the bytes
that the copy engine still has to deliver, and every reader at `empty`. When all arrivals of a round
are in, and all bytes, a barrier flips its phase bit.
mbarrier.wait(barrier, phase) returns unless the round with this parity is still open, so a reader
waits at `full` for the parity of its round, the writer at `empty` for that of the round before. No
round precedes round 0, and a new barrier lets the writer pass.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def make_barriers(STAGES: gl.constexpr, count: gl.constexpr):
    """One mbarrier per stage, each waiting for `count` arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(barriers.index(i), count=count)
    return barriers


@gluon.jit
def make_full_and_empty(STAGES: gl.constexpr, readers: gl.constexpr):
    """Barriers (full, empty) of a ring with one writer, one of each per stage."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        # One arrival per filling: that of `mbarrier.expect` ahead of copies, or of a writing warp.
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=readers)
    return full, empty


@gluon.jit
def phase_of(c, STAGES: gl.constexpr):
    """Phase of use c of a ring: the parity of its round."""
    return (c // STAGES) & 1


@gluon.jit
def wait_full(full, c, pred=True):
    """Wait, as a reader, until use c of a ring has been written."""
    mbarrier.wait(full.index(c % full.shape[0]), phase_of(c, full.shape[0]), pred=pred)


@gluon.jit
def wait_empty(empty, c):
    """Wait, as the writer, until all readers are done with what use c replaces."""
    # ^ 1 is the parity of the round before, which a new barrier reports as complete.
    mbarrier.wait(empty.index(c % empty.shape[0]), phase_of(c, empty.shape[0]) ^ 1)


@gluon.jit
def arrive(barriers, c, pred=True):
    """Arrive at the barrier of use c: the writer at a full one, a reader at an empty one."""
    mbarrier.arrive(barriers.index(c % barriers.shape[0]), count=1, pred=pred)
