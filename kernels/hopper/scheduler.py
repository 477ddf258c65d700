"""Dynamic persistent scheduling: which row tile or key tile a program works on next.

One program runs on each SM for the whole launch. Its producer warp takes the next work index from
a counter in global memory and publishes it to the consumer groups through a work queue in shared
memory, one tile ahead of them. Programs that get short tiles take more of them.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .gluon import first_lane
from .pipeline import arrive, make_full_and_empty, wait_empty, wait_full

SLOTS = gl.constexpr(2)


class Order(NamedTuple):
    """Tiles that the work indices enumerate: row tiles, or in the backward pass key tiles."""

    n_tiles: gl.tensor  # per head
    n_heads: gl.tensor  # batch times heads; in the backward pass, times key-value heads
    section: gl.tensor  # heads that are processed together


class WorkQueue(NamedTuple):
    """A ring of work indices, from the producer of a program to its consumers."""

    items: gl.shared_memory_descriptor  # (SLOTS * (1 + EXTRA), 1) int32: `slot_of`
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


@gluon.jit
def make_work_queue(READERS: gl.constexpr, EXTRA: gl.constexpr = 0):
    """Empty queue for READERS roles; each item is a work index and EXTRA more numbers."""
    return WorkQueue(make_scalars(SLOTS * (1 + EXTRA)), *make_full_and_empty(SLOTS, READERS))


@gluon.jit
def make_scalars(N: gl.constexpr):
    """N int32 in shared memory, of shape (N, 1)."""
    return gl.allocate_shared_memory(gl.int32, [N, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def store_scalar(place, number):
    """Store a number in shared memory, (1,) int32."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    place.store(gl.full([1], 0, gl.int32, layout=layout) + number)


@gluon.jit
def load_scalar(place):
    """Load a number from shared memory, (1,) int32, as a scalar."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    # Broadcast one lane, so that the compiler knows that all threads branch alike.
    return gl.max(first_lane(place.load(layout)), 0)


@gluon.jit
def slot_of(queue, i, j: gl.constexpr):
    """Slot of number j of item i; number 0 is the work index."""
    return queue.items.index(SLOTS * j + i % SLOTS)


@gluon.jit
def peek(queue, i):
    """Wait for the i-th work index. Once the item is read, the caller arrives at `queue.empty`."""
    wait_full(queue.full, i)
    return load_scalar(slot_of(queue, i, 0))


@gluon.jit
def push(queue, i, work_index):
    """Publish the i-th work index of this program, once all readers have read index i - 2."""
    wait_empty(queue.empty, i)
    store_scalar(slot_of(queue, i, 0), work_index)
    arrive(queue.full, i)


@gluon.jit
def pop(queue, i):
    """Wait for the i-th work index of this program and free its slot."""
    work_index = peek(queue, i)
    arrive(queue.empty, i)
    return work_index


@gluon.jit
def first_index(team: gl.constexpr, TEAMS: gl.constexpr):
    """First work index of a team, if each program has TEAMS of them."""
    return gl.program_id(0) * TEAMS + team


@gluon.jit
def next_index(counter, TEAMS: gl.constexpr):
    """Take the next work index; they begin after the `first_index` of all teams."""
    # Relaxed, because the counter orders no other memory: it only has to give each index once.
    return gl.num_programs(0) * TEAMS + gl.atomic_add(counter, 1, sem="relaxed")


@gluon.jit
def finish(counter, PRODUCERS: gl.constexpr):
    """Reset the counters for the next launch, if this is the last producer of all programs.

    PRODUCERS is their number in a program.
    """
    # A producer counts itself after its last work index, so the last one knows that none is taken
    # any more.
    done = gl.atomic_add(counter + 1, 1, sem="relaxed")
    if done == gl.num_programs(0) * PRODUCERS - 1:
        gl.store(counter, 0)
        gl.store(counter + 1, 0)


@gluon.jit
def locate(work_index, order, LONGEST_FIRST: gl.constexpr):
    """(row tile, head) of a work index.

    Heads are processed in sections, whose keys and values fit in the L2 cache together. In a
    section LONGEST_FIRST takes the last row tiles of all heads first: under a causal mask they see
    the most keys, and a long tile must not start last.
    """
    first = work_index // (order.section * order.n_tiles) * order.section
    rest = work_index - first * order.n_tiles
    if LONGEST_FIRST:
        # The last section may have fewer heads.
        width = gl.minimum(order.section, order.n_heads - first)
        return order.n_tiles - 1 - rest // width, first + rest % width
    else:
        return rest % order.n_tiles, first + rest // order.n_tiles
