"""Block ranges of the backward pass: which queries a key tile visits, and in which order.

A program owns 128 keys, a group 64 of them. It visits the blocks of 128 queries that see its keys,
from the first to the last or back, as two row tiles of 64 queries each. The key tiles that visit a
block add to its dq one after the other, in the order of their work indices. Under a mask in blocks
of 64 a program has one group, and a block is one row tile: `plan.block` is 64, in keys and queries.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...mask import schedule as mask_schedule
from ...triton.block_ranges import n_keys_of
from ..gluon import opaque
from ..pipeline import arrive, wait_empty
from ..scheduler import Order, load_scalar, locate, push, slot_of, store_scalar
from . import plan as backward_plan

M = gl.constexpr(backward_plan.QUERIES)  # queries of a row tile
GROUP_N = gl.constexpr(backward_plan.KEYS)  # keys of a group
N = gl.constexpr(backward_plan.BLOCK)  # keys of a program, except for masks in blocks of 64
BLOCK = gl.constexpr(backward_plan.BLOCK)
WORK_FIELDS = gl.constexpr(5)  # of `Work`, in the work queue
SPLIT = gl.constexpr(mask_schedule.SPLIT_STRIDE)  # the upper bits of an entry number its split


class Work(NamedTuple):
    """The key tile of a work index, and the range of query blocks that it visits."""

    key_tile: gl.tensor
    batch_kv: gl.tensor  # batch times key-value heads
    # 1 if the range is visited from its first block on, -1 if from its last one. In a block list:
    # the position of its entry, with the number of its split, from 1 on, in the upper 16 bits
    direction: gl.tensor
    first: gl.tensor  # [first, end): blocks of queries, or visits of a block list
    end: gl.tensor


@gluon.jit
def block_tiles(block, batch, call, plan: gl.constexpr):
    """[first, last]: key tiles that visit a block of queries. No bound falls from block to block.

    They are the tiles that the block sees, and those between them. A block that sees none is
    visited by one that it would see without padding and documents, so that its dq is written.
    """
    features: gl.constexpr = plan.features
    start = block * BLOCK + call.seq_k - call.seq_q  # the key position of its first query
    last = gl.maximum(n_keys_of(batch, call, features) - 1, 0)
    if features.causal:
        last = gl.minimum(last, gl.maximum(start + BLOCK - 1, 0))
    elif features.window:
        last = gl.minimum(last, gl.maximum(start + BLOCK + call.window_size - 2, 0))
    last = last // N
    first = 0
    if features.window:
        first = gl.maximum(start - call.window_size + 1, 0) // N
    if features.documents:
        n_blocks = gl.cdiv(call.seq_q, BLOCK)
        least = gl.load(call.doc_blocks_ptr + batch * n_blocks + block)
        first = gl.maximum(first, gl.maximum(least, 0) // N)
    return gl.minimum(first, last), last


@gluon.jit
def _document_bounds(half_tile, batch, call):
    """Pointer to the bounds of one group's keys; each key tile has two groups."""
    return call.doc_tiles_ptr + (batch * gl.cdiv(call.seq_k, N) * 2 + half_tile) * 2


@gluon.jit
def visited_blocks(key_tile, batch, call, plan: gl.constexpr):
    """[first, end): blocks of queries that a key tile visits, without a block-sparse mask.

    The inverse of `block_tiles`.
    """
    features: gl.constexpr = plan.features
    n_blocks = gl.cdiv(call.seq_q, BLOCK)
    # A block whose last visible key is in this tile begins at query `ahead` or later.
    ahead = key_tile * N - (call.seq_k - call.seq_q)
    first = 0
    end = n_blocks
    if features.causal or features.window:
        if not features.causal:
            ahead -= call.window_size - 1
        first = gl.where(key_tile == 0, 0, gl.maximum(ahead, 0) // BLOCK)
    if features.window or features.documents:
        if features.window:
            # Number of the last query that sees the last key of the tile.
            reach = (key_tile + 1) * N - 1 - (call.seq_k - call.seq_q) + call.window_size - 1
            end = gl.minimum(gl.maximum(reach + BLOCK, 0) // BLOCK, end)
        if features.documents:
            # From this query on, all documents begin behind the second half of the tile.
            queries = gl.load(_document_bounds(key_tile * 2 + 1, batch, call) + 1)
            end = gl.minimum(end, gl.cdiv(queries, BLOCK))
        if features.causal or features.window:
            end = gl.maximum(end, gl.minimum(gl.maximum(ahead + BLOCK, 0) // BLOCK, n_blocks))
        # The last tile that is not all padding also serves blocks that would see later tiles only.
        last = gl.maximum(n_keys_of(batch, call, features) - 1, 0) // N
        end = gl.where(key_tile == last, n_blocks, end)
    # Tiles of padding visit nothing, except that tile 0 serves a sequence without any key.
    if features.lengths:
        there = (key_tile == 0) | (key_tile * N < n_keys_of(batch, call, features))
        end = gl.where(there, end, first)
    return first, gl.maximum(end, first)


@gluon.jit
def _range_entry(position, head, call):
    """Pointer to an entry of a block list, given its position or `Work.direction`."""
    return call.ranges_ptr + (head * call.mask_stride + position % SPLIT * 3)


@gluon.jit
def split_of(work, order, plan: gl.constexpr):
    """Index in `Call.splits_ptr` of partial dk and dv; negative if the column is not split."""
    if plan.has_block_list:
        return (work.direction // SPLIT - 1) * order.n_heads + work.batch_kv
    else:
        return -1


@gluon.jit
def work_of_head(work, head, h, call, plan: gl.constexpr):
    """`work` with the block range of the h-th query head of its group, number `head` of all.

    Block lists may differ between heads, and `work_of` has read that of the first.
    """
    if plan.has_block_list:
        first, end = work.first, work.end
        if h > 0:
            entry = _range_entry(work.direction, head, call)
            first = gl.load(entry + 1)
            end = gl.load(entry + 2)
        return Work(work.key_tile, work.batch_kv, work.direction, first, end)
    else:
        return work


@gluon.jit
def visit_at(i, work, call, plan: gl.constexpr):
    """(block of queries, dq schedule) of the i-th visit; zeros past the end of a list.

    In a packed list the block carries its parts. The schedule is the argument of `dq_rank`.
    """
    if plan.has_block_list:
        visit = call.visits_ptr + 2 * (work.first + i)
        there = work.first + i < work.end
        return gl.load(visit, mask=there, other=0), gl.load(visit + 1, mask=there, other=0)
    else:
        return gl.where(work.direction > 0, work.first, work.end - 1) + i * work.direction, 0


@gluon.jit
def row_tile_at(i, work, call, plan: gl.constexpr):
    """Row tile (packed: its entry) of the i-th visit; 0 past the end of a list."""
    STEPS: gl.constexpr = plan.block // M
    if plan.has_block_list:
        block, _ = visit_at(i // STEPS, work, call, plan)
        return block if plan.features.packed else block * STEPS + i % STEPS
    else:
        start = gl.where(work.direction > 0, work.first * STEPS, work.end * STEPS - 1)
        # Opaque: the compiler would keep what loops derive from it in registers of their own, some
        # of them 64 bits wide, and these spill.
        return opaque(start + i * work.direction)


@gluon.jit
def group_view(work, cid: gl.constexpr, batch, call, plan: gl.constexpr):
    """Queries that group cid skips, and queries that see all of its keys.

    Returns:
        (skipped, from, to): number of row tiles that the group skips at the beginning, 0 or 1 (in a
        block list, use `skips_row_tile`); and the queries [from, to) that see all of its keys.
    """
    features: gl.constexpr = plan.features
    start_n = work.key_tile * plan.block + cid * GROUP_N
    diagonal = call.seq_k - call.seq_q
    skipped = 0
    whole_from = 0
    whole_to = call.seq_q + plan.block
    if features.causal:
        # Keys of the second group come later, so the first row tile may see none of them. In a
        # reversed range that row tile comes last, and is masked.
        if cid > 0:
            skips = (start_n - diagonal >= work.first * plan.block + M) & (work.end > work.first)
            skipped = gl.where(skips & (work.direction > 0), 1, 0)
        whole_from = start_n + GROUP_N - 1 - diagonal
    elif features.window:
        whole_from = start_n + GROUP_N - 1 - diagonal - (call.window_size - 1)
    if features.window:
        whole_to = start_n - diagonal + call.window_size
    if features.documents:
        bounds = _document_bounds(start_n // GROUP_N, batch, call)
        whole_to = gl.minimum(whole_to, gl.load(bounds))
    # If some keys do not exist, no query sees all of them: mask every row tile.
    if plan.ragged or features.lengths:
        beyond = start_n + GROUP_N > n_keys_of(batch, call, features)
        whole_from = gl.where(beyond, call.seq_q + plan.block, whole_from)
    return skipped, whole_from, whole_to


@gluon.jit
def skips_row_tile(row_tile, key_tile, cid: gl.constexpr, call, plan: gl.constexpr):
    """Whether, under a causal mask, no query of a row tile sees a key of group cid."""
    start_n = key_tile * plan.block + cid * GROUP_N
    return start_n - (call.seq_k - call.seq_q) >= row_tile * M + M


@gluon.jit
def dq_rank(block, schedule, work, batch, call, plan: gl.constexpr):
    """(rank, last): numbers of key tiles that add to a block before this one, and before the last.

    Under a block-sparse mask they come from the schedule of `visit_at`. There `last` may be too
    low, but it exceeds the rank if others add after this one.
    """
    if plan.has_block_list:
        return schedule // 2, schedule // 2 + schedule % 2
    else:
        first, last = block_tiles(block, batch, call, plan)
        # Key tiles add in the order of their work indices (`key_tile_of`).
        rank = work.key_tile - first
        if plan.features.causal:
            rank = gl.where(work.direction > 0, last - work.key_tile, rank)
        return rank, last - first


@gluon.jit
def work_of(work_index, order, call, plan: gl.constexpr):
    """`Work` of a work index; past the end, of the last one.

    In a block list its range is that of the first query head.
    """
    work_index = gl.minimum(work_index, order.n_tiles * order.n_heads - 1)
    key_tile, batch_kv, direction = key_tile_of(work_index, order, call, plan)
    kv_heads = call.n_head // call.group
    if plan.has_block_list:
        entry = _range_entry(direction, batch_kv % kv_heads * call.group, call)
        first, end = gl.load(entry + 1), gl.load(entry + 2)
    else:
        first, end = visited_blocks(key_tile, batch_kv // kv_heads, call, plan)
    return Work(key_tile, batch_kv, direction, first, end)


@gluon.jit
def push_work(queue, i, work_index, order, call, plan: gl.constexpr):
    """Publish the i-th work index of this program, and return its `Work`.

    Under a block-sparse mask the queue carries the `Work` also, so that one warp reads the list for
    all.
    """
    if plan.has_block_list:
        work = work_of(work_index, order, call, plan)
        wait_empty(queue.empty, i)
        store_scalar(slot_of(queue, i, 0), work_index)
        for j in gl.static_range(WORK_FIELDS):
            store_scalar(slot_of(queue, i, j + 1), work[j])
        arrive(queue.full, i)
        return work
    else:
        push(queue, i, work_index)
        return work_of(work_index, order, call, plan)


@gluon.jit
def pop_work(queue, i, work_index, order, call, plan: gl.constexpr):
    """`Work` of the i-th work index of this program, after `peek`. Frees its slot."""
    if plan.has_block_list:
        work = Work(
            load_scalar(slot_of(queue, i, 1)), load_scalar(slot_of(queue, i, 2)),
            load_scalar(slot_of(queue, i, 3)), load_scalar(slot_of(queue, i, 4)),
            load_scalar(slot_of(queue, i, 5)),
        )  # fmt: skip
        arrive(queue.empty, i)
        return work
    else:
        arrive(queue.empty, i)
        return work_of(work_index, order, call, plan)


@gluon.jit
def key_tile_of(work_index, order, call, plan: gl.constexpr):
    """(key tile, batch times key-value head, `Work.direction`) of a work index.

    The heads of a section are processed together. Under a causal mask their last keys come first.
    A range begins at the diagonal, so programs that start together follow each other at a distance
    of one block. In the last section the first keys come first, with their ranges reversed, so that
    no long range starts last. Without a mask the first keys come first, and programs soon settle at
    a distance of one block. Under a block-sparse mask the order is that of its list.
    """
    # `locate` alternates between the heads of a section, from the last tile down. Its tiles are
    # reversed where key tiles, or positions in a list, have to ascend.
    if plan.has_block_list:
        rest, batch_kv = locate(work_index, order, True)
        position = order.n_tiles - 1 - rest
        head = batch_kv % (call.n_head // call.group) * call.group
        number = gl.load(_range_entry(position, head, call))
        return number % SPLIT, batch_kv, position + number // SPLIT * SPLIT
    elif plan.features.causal:
        heads = order.n_heads - order.section  # before the last section
        last = work_index - heads * order.n_tiles
        before = Order(order.n_tiles, gl.maximum(heads, 1), order.section)
        in_sections = gl.minimum(work_index, before.n_heads * order.n_tiles - 1)
        rest, head = locate(in_sections, before, True)
        key_tile = gl.where(last < 0, rest, last // order.section)
        head = gl.where(last < 0, head, heads + last % order.section)
        return key_tile, head, gl.where(last < 0, 1, -1)
    else:
        rest, head = locate(work_index, order, True)
        return order.n_tiles - 1 - rest, head, 1
