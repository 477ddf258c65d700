"""Which row tile a program takes next: numbers from a counter, passed on to the consumers.

One program runs on each multiprocessor for the whole launch. Its producer warp draws tile numbers
from a counter in memory, so that a program which had short tiles takes more of them. It hands each
number to the consumer groups through a mailbox in shared memory, one tile ahead of them.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .gluon import first_lane
from .pipeline import arrive, make_full_and_empty, wait_empty, wait_full

SLOTS = gl.constexpr(2)


class Order(NamedTuple):
    """How row tiles are counted."""

    n_tiles: gl.tensor  # row tiles of a head
    n_heads: gl.tensor  # batch times heads
    section: gl.tensor  # heads that are worked on together


class Mailbox(NamedTuple):
    """Tile numbers on their way from the producer to the consumers of a program."""

    number: gl.shared_memory_descriptor  # `place_of` tells which is where
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


@gluon.jit
def make_mailbox(READERS: gl.constexpr, MORE: gl.constexpr = 0):
    """An empty mailbox for READERS consumer groups; MORE numbers may go with that of a tile."""
    number = make_numbers(SLOTS * (1 + MORE))
    full, empty = make_full_and_empty(SLOTS, READERS)
    return Mailbox(number, full, empty)


@gluon.jit
def make_numbers(N: gl.constexpr):
    """N places in shared memory, each for a number."""
    return gl.allocate_shared_memory(gl.int32, [N, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def post_number(place, number):
    """Put a number into a place in shared memory, (1,) int32."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    place.store(gl.full([1], 0, gl.int32, layout=layout) + number)


@gluon.jit
def read_number(place):
    """The number of a place in shared memory, the same in all threads."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    # from one lane, so that the compiler knows that all threads branch alike
    return gl.max(first_lane(place.load(layout)), 0)


@gluon.jit
def place_of(box, i, j: gl.constexpr):
    """Where the mailbox has the j-th number that goes with the i-th tile; 0 is the tile's own."""
    return box.number.index(SLOTS * j + i % SLOTS)


@gluon.jit
def peek(box, i):
    """The i-th tile number of this program; the reader arrives at `empty` when done."""
    wait_full(box.full, i)
    return read_number(place_of(box, i, 0))


@gluon.jit
def post(box, i, tile):
    """Put the i-th tile number of this program into the mailbox, once there is room."""
    wait_empty(box.empty, i)
    post_number(place_of(box, i, 0), tile)
    arrive(box.full, i)


@gluon.jit
def receive(box, i):
    """The i-th tile number of this program, the same in all threads."""
    tile = peek(box, i)
    arrive(box.empty, i)
    return tile


@gluon.jit
def first_tile(team: gl.constexpr, TEAMS: gl.constexpr):
    """What a team begins with, of TEAMS that each program has."""
    return gl.program_id(0) * TEAMS + team


@gluon.jit
def draw(counter, TEAMS: gl.constexpr):
    """The next tile: teams begin with `first_tile`, and draw from there on."""
    return gl.num_programs(0) * TEAMS + gl.atomic_add(counter, 1, sem="relaxed")


@gluon.jit
def finish(counter, DRAWERS: gl.constexpr):
    """The last to finish, of DRAWERS in each program, leaves the counters at zero for the next
    launch."""
    done = gl.atomic_add(counter + 1, 1, sem="relaxed")
    if done == gl.num_programs(0) * DRAWERS - 1:
        gl.store(counter, 0)
        gl.store(counter + 1, 0)


@gluon.jit
def locate(tile, order, LONGEST_FIRST: gl.constexpr):
    """(row tile, head) of a tile number.

    A section of heads at a time, whose keys and values fit in the L2 cache together. In a section
    LONGEST_FIRST takes the last row tiles of all heads first: under a causal mask they see the most
    keys, and a long tile must not start last.
    """
    first = tile // (order.section * order.n_tiles) * order.section
    rest = tile - first * order.n_tiles
    if LONGEST_FIRST:
        width = gl.minimum(order.section, order.n_heads - first)
        return order.n_tiles - 1 - rest // width, first + rest % width
    else:
        return rest % order.n_tiles, first + rest // order.n_tiles
