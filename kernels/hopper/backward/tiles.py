"""Which queries a tile of keys visits in the backward pass, and whose turn it is to add to dq.

A program owns 128 keys, a group 64 of them. It walks from the first queries that see its keys to
the last, or back, two row tiles of 64 queries at a time: a block, to whose dq the key tiles that
visit it add one after the other, in the order in which they are drawn. For a mask in blocks of 64 a
program has one group, and a block is a row tile: both are `plan.block`, of keys and of queries.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...mask import schedule as mask_schedule
from ...triton.block_ranges import n_keys_of
from ..pipeline import arrive, wait_empty
from ..scheduler import (
    Order,
    locate,
    place_of,
    post,
    post_number,
    read_number,
)
from . import plan as backward_plan

M = gl.constexpr(backward_plan.QUERIES)  # queries of a row tile
GROUP_N = gl.constexpr(backward_plan.KEYS)  # keys of a group
N = gl.constexpr(backward_plan.BLOCK)  # keys of a program, but for masks in blocks of 64
BLOCK = gl.constexpr(backward_plan.BLOCK)
WORK = gl.constexpr(5)  # numbers that a `Work` is
PIECE = gl.constexpr(mask_schedule.SPLIT_STRIDE)


class Work(NamedTuple):
    """The key tile of a work index, and the range of query blocks that it visits."""

    key_tile: gl.tensor
    batch_kv: gl.tensor  # batch times key-value heads
    # 1 if the range is visited from its first block on, -1 if from its last one. In a block list:
    # the position of its entry, and in the upper 16 bits the number of the piece
    way: gl.tensor
    first: gl.tensor  # [first, end): blocks of queries, or visits of a block list
    end: gl.tensor


@gluon.jit
def n_keys(batch, call, plan: gl.constexpr):
    """Number of keys, without padding."""
    features: gl.constexpr = plan.features
    return n_keys_of(batch, call, features)


@gluon.jit
def block_tiles(block, batch, call, plan: gl.constexpr):
    """[first, last]: the key tiles that visit a block of queries, the same or later ones for a
    later block. They are those that it sees, with some in between that it may not see, and if it
    sees none one that it would see if there were no padding and no documents."""
    start = block * BLOCK + call.seq_k - call.seq_q  # the key position of its first query
    last = gl.maximum(n_keys(batch, call, plan) - 1, 0)
    if plan.features.causal:
        last = gl.minimum(last, gl.maximum(start + BLOCK - 1, 0))
    elif plan.features.window:
        last = gl.minimum(last, gl.maximum(start + BLOCK + call.window_size - 2, 0))
    last = last // N
    first = 0
    if plan.features.window:
        first = gl.maximum(start - call.window_size + 1, 0) // N
    if plan.features.documents:
        n_blocks = gl.cdiv(call.seq_q, BLOCK)
        least = gl.load(call.doc_blocks_ptr + batch * n_blocks + block)
        first = gl.maximum(first, gl.maximum(least, 0) // N)
    return gl.minimum(first, last), last


@gluon.jit
def visited_blocks(key_tile, batch, call, plan: gl.constexpr):
    """[first, end): the blocks of queries that a key tile visits, by `block_tiles` of each, without
    a block-sparse mask."""
    features: gl.constexpr = plan.features
    n_blocks = gl.cdiv(call.seq_q, BLOCK)
    # the queries of a block stand `ahead` after its keys, or later, if it sees the tile last
    ahead = key_tile * N - (call.seq_k - call.seq_q)
    first = 0
    end = n_blocks
    if features.causal or features.window:
        if not features.causal:
            ahead -= call.window_size - 1
        first = gl.where(key_tile == 0, 0, gl.maximum(ahead, 0) // BLOCK)
    if features.window or features.documents:
        if features.window:
            # of the last query that sees the last key
            reach = (key_tile + 1) * N - 1 - (call.seq_k - call.seq_q) + call.window_size - 1
            end = gl.minimum(gl.maximum(reach + BLOCK, 0) // BLOCK, end)
        if features.documents:
            n_tiles = gl.cdiv(call.seq_k, N)
            end = gl.minimum(end, gl.load(call.doc_tiles_ptr + (batch * n_tiles + key_tile) * 3))
        if features.causal or features.window:
            end = gl.maximum(end, gl.minimum(gl.maximum(ahead + BLOCK, 0) // BLOCK, n_blocks))
        # the last tile is there for those that would see later ones
        last = gl.maximum(n_keys(batch, call, plan) - 1, 0) // N
        end = gl.where(key_tile == last, n_blocks, end)
    if features.lengths:
        there = (key_tile == 0) | (key_tile * N < n_keys(batch, call, plan))
        end = gl.where(there, end, first)
    return first, gl.maximum(end, first)


@gluon.jit
def _walk_of(place, head, call):
    """Where a list has the walk of a query head that is drawn at this place, or on this way."""
    return call.walks_ptr + (head * call.mask_stride + place % PIECE * 3)


@gluon.jit
def piece_of(work, order, plan: gl.constexpr):
    """Where in `Call.pieces_ptr` a program leaves dk and dv; negative if its column is not cut."""
    if plan.listed:
        return (work.way // PIECE - 1) * order.n_heads + work.batch_kv
    else:
        return -1


@gluon.jit
def head_work(work, head, h, call, plan: gl.constexpr):
    """`work` with the range of the h-th query head of its group, number `head` of all: a block list
    has one for each head, of which `work_of` gave the first."""
    if plan.listed:
        first, end = _head_range(work, head, h, call)
        return Work(work.key_tile, work.batch_kv, work.way, first, end)
    else:
        return work


@gluon.jit
def _head_range(work, head, h, call):
    first, end = work.first, work.end
    if h > 0:
        walk = _walk_of(work.way, head, call)
        first = gl.load(walk + 1)
        end = gl.load(walk + 2)
    return first, end


@gluon.jit
def visit_at(i, work, call, plan: gl.constexpr):
    """(block, dq schedule) of the i-th visit: the block of queries, in a packed list with its
    parts, and what the list says of `turn` there; zeros past the end of a list."""
    if plan.listed:
        visit = call.visits_ptr + 2 * (work.first + i)
        there = work.first + i < work.end
        return gl.load(visit, mask=there, other=0), gl.load(visit + 1, mask=there, other=0)
    else:
        return gl.where(work.way > 0, work.first, work.end - 1) + i * work.way, 0


@gluon.jit
def row_tile_at(i, work, call, plan: gl.constexpr):
    """The i-th row tile that is visited, in a packed list with its parts; 0 past the end of a
    list."""
    STEPS: gl.constexpr = plan.block // M
    if plan.listed:
        block, _ = visit_at(i // STEPS, work, call, plan)
        return block if plan.features.packed else block * STEPS + i % STEPS
    else:
        return gl.where(work.way > 0, work.first * STEPS, work.end * STEPS - 1) + i * work.way


@gluon.jit
def group_view(work, cid: gl.constexpr, batch, call, plan: gl.constexpr):
    """What group cid sees of the queries that its program visits.

    Returns:
        (skipped, from, to): how many row tiles the group skips at the beginning, 0 or 1 (in a
        block list `passes_over` tells), and the queries [from, to) that see all of its keys.
    """
    features: gl.constexpr = plan.features
    start_n = work.key_tile * plan.block + cid * GROUP_N
    diagonal = call.seq_k - call.seq_q
    skipped = 0
    whole_from = 0
    whole_to = call.seq_q + plan.block
    if features.causal:
        if cid > 0:
            skips = (start_n - diagonal >= work.first * plan.block + M) & (work.end > work.first)
            skipped = gl.where(skips & (work.way > 0), 1, 0)
        whole_from = start_n + GROUP_N - 1 - diagonal
    elif features.window:
        whole_from = start_n + GROUP_N - 1 - diagonal - (call.window_size - 1)
    if features.window:
        whole_to = start_n - diagonal + call.window_size
    if features.documents:
        group = start_n // GROUP_N
        place = (batch * gl.cdiv(call.seq_k, N) + group // 2) * 3 + 1 + group % 2
        whole_to = gl.minimum(whole_to, gl.load(call.doc_tiles_ptr + place))
    if plan.ragged or features.lengths:
        beyond = start_n + GROUP_N > n_keys(batch, call, plan)
        whole_from = gl.where(beyond, call.seq_q + plan.block, whole_from)
    return skipped, whole_from, whole_to


@gluon.jit
def passes_over(row_tile, key_tile, cid: gl.constexpr, call, plan: gl.constexpr):
    """Whether no query of a row tile sees a key of group cid under a causal mask."""
    start_n = key_tile * plan.block + cid * GROUP_N
    return start_n - (call.seq_k - call.seq_q) >= row_tile * M + M


@gluon.jit
def turn(block, place, work, batch, call, plan: gl.constexpr):
    """(how many key tiles add to a block of queries before this one, how many before the last).

    Under a block-sparse mask `place` tells, of `visit_at`. The second number may be too low there,
    but is above the first if others add after this one.
    """
    if plan.listed:
        return place // 2, place // 2 + place % 2
    else:
        first, last = block_tiles(block, batch, call, plan)
        rank = work.key_tile - first
        if plan.features.causal:
            rank = gl.where(work.way > 0, last - work.key_tile, rank)
        return rank, last - first


@gluon.jit
def work_of(ticket, order, call, plan: gl.constexpr):
    """The `Work` of a ticket, in a block list with the range of the first query head; of a ticket
    too high, the last one."""
    ticket = gl.minimum(ticket, order.n_tiles * order.n_heads - 1)
    key_tile, batch_kv, way = key_tile_of(ticket, order, call, plan)
    kv_heads = call.n_head // call.group
    if plan.listed:
        walk = _walk_of(way, batch_kv % kv_heads * call.group, call)
        first, end = gl.load(walk + 1), gl.load(walk + 2)
    else:
        first, end = visited_blocks(key_tile, batch_kv // kv_heads, call, plan)
    return Work(key_tile, batch_kv, way, first, end)


@gluon.jit
def post_work(box, i, ticket, order, call, plan: gl.constexpr):
    """Put the i-th ticket of this program into the mailbox, and give its `Work`. Under a
    block-sparse mask that goes with it, so that one warp reads the list for all."""
    if plan.listed:
        work = work_of(ticket, order, call, plan)
        wait_empty(box.empty, i)
        post_number(place_of(box, i, 0), ticket)
        for j in gl.static_range(WORK):
            post_number(place_of(box, i, j + 1), work[j])
        arrive(box.full, i)
        return work
    else:
        post(box, i, ticket)
        return work_of(ticket, order, call, plan)


@gluon.jit
def take_work(box, i, ticket, order, call, plan: gl.constexpr):
    """The `Work` of the i-th ticket of this program, after a `peek` at it."""
    if plan.listed:
        work = Work(
            read_number(place_of(box, i, 1)),
            read_number(place_of(box, i, 2)),
            read_number(place_of(box, i, 3)),
            read_number(place_of(box, i, 4)),
            read_number(place_of(box, i, 5)),
        )
        arrive(box.empty, i)
        return work
    else:
        arrive(box.empty, i)
        return work_of(ticket, order, call, plan)


@gluon.jit
def key_tile_of(ticket, order, call, plan: gl.constexpr):
    """(key tile, batch times key-value head, way of the walk) of the ticket-th tile that is drawn.

    Under a block-sparse mask they come in the order of its list, and the place there stands for the
    way of the walk, with the number of the piece in its upper 16 bits.

    The heads of a section are worked on together. Under a causal mask their last keys come first:
    a walk begins where its keys begin, so that programs which start together follow each other at a
    distance of a block. In the last section first keys come first, and walks go back, so that no
    long walk starts last. Without a mask first keys come first, and programs fall into the distance
    of a block.
    """
    if plan.listed:
        rest, batch_kv = locate(ticket, order, True)
        place = order.n_tiles - 1 - rest
        head = batch_kv % (call.n_head // call.group) * call.group
        number = gl.load(_walk_of(place, head, call))
        return number % PIECE, batch_kv, place + number // PIECE * PIECE
    elif plan.features.causal:
        heads = order.n_heads - order.section  # before the last section
        last = ticket - heads * order.n_tiles
        before = Order(order.n_tiles, gl.maximum(heads, 1), order.section)
        place, head = locate(gl.minimum(ticket, before.n_heads * order.n_tiles - 1), before, True)
        key_tile = gl.where(last < 0, place, last // order.section)
        head = gl.where(last < 0, head, heads + last % order.section)
        return key_tile, head, gl.where(last < 0, 1, -1)
    else:
        place, head = locate(ticket, order, True)
        return order.n_tiles - 1 - place, head, 1
