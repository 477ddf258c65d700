"""Which tiles a program visits: the keys that a tile of queries sees, the queries that see keys.

Every option but the block-sparse mask leaves a query an interval of keys: a causal mask ends it, a
window and packed documents begin it, padding ends it. So the tiles that a program visits are a
range with some in the middle that need no mask, and a mask costs two comparisons. Under a
block-sparse mask they come from a list, those that need no mask first.

A walk has two loops, over offsets that `walk_tile` turns into tiles: the first over tiles that need
no mask, the second over the others. It is

    (full_begin, full_end, full_block, masked_begin, masked_end, masked_block, gap_at, gap),

where a range has no blocks, and a list has its blocks in the place of gap_at and no gap. `features`
is `kernels.options.Features`.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..mask.lists import ENTRY_NUMBERS

ENTRY = tl.constexpr(ENTRY_NUMBERS)


class Call(NamedTuple):
    """What all programs of a launch share; pointers are None where a feature is off."""

    seq_q: tl.tensor
    seq_k: tl.tensor
    window_size: tl.tensor
    scale_log2: tl.tensor
    softcap_scale: tl.tensor
    keep_scale: tl.tensor
    threshold: tl.tensor
    seed_ptr: tl.tensor
    doc_ptr: tl.tensor
    lengths_ptr: tl.tensor
    lists_ptr: tl.tensor  # entries of rows or columns of a block-sparse mask
    blocks_ptr: tl.tensor  # and their blocks
    mask_head_stride: tl.tensor


@triton.jit
def visible_keys(query, n_keys, diagonal, window_size, features: tl.constexpr):
    """[lower, upper): the keys that `query`, a vector or a number, sees in a dense layout.

    A query stands at the key position `query + diagonal`. Documents come on top of it.
    """
    position = query + diagonal
    lower = position * 0
    upper = position * 0 + n_keys
    if features.causal:
        upper = tl.minimum(upper, position + 1)
    elif features.window:
        upper = tl.minimum(upper, position + window_size)
    if features.window:
        lower = tl.maximum(lower, position - window_size + 1)
    return lower, upper


@triton.jit
def visible_queries(key, seq_q, diagonal, window_size, features: tl.constexpr):
    """[first, end): the queries that see the key number `key` in a dense layout."""
    position = key - diagonal
    first = position * 0
    end = position * 0 + seq_q
    if features.causal:
        first = tl.maximum(first, position)
    elif features.window:
        first = tl.maximum(first, position - window_size + 1)
    if features.window:
        end = tl.minimum(end, position + window_size)
    return first, end


@triton.jit
def n_keys_of(batch, call, features: tl.constexpr):
    """How many keys there are, without padding."""
    if features.lengths:
        return tl.minimum(call.seq_k, tl.load(call.lengths_ptr + batch))
    else:
        return call.seq_k


@triton.jit
def key_walk(
    tile, n_tiles, batch, head, call, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_N_MASKED: tl.constexpr, features: tl.constexpr,
):  # fmt: skip
    """The work of program number `tile` of the `n_tiles` of a head: its queries, and their keys.

    Longest work first, because a long tile must not start last: that is the last rows under a
    causal mask; a block-sparse mask lists its rows in this order.

    Returns:
        (start_m, offs_m (M,), lower (M,), upper (M,), walk): query m sees the keys
        [lower, upper) of the tiles of the walk.
    """
    seq_q, window_size = call.seq_q, call.window_size
    diagonal = call.seq_k - seq_q
    n_keys = n_keys_of(batch, call, features)
    if features.mask_block_size > 0:
        start_m, entry = _mask_entry(head, tile, call, BLOCK_M, features)
    else:
        start_m = (n_tiles - 1 - tile) * BLOCK_M
    offs_m = start_m + tl.arange(0, BLOCK_M)
    lower, upper = visible_keys(offs_m, n_keys, diagonal, window_size, features)
    if features.documents:
        doc_start = load_doc_start(batch, offs_m, call)
        lower = tl.maximum(lower, doc_start)
    some_from, all_to = visible_keys(start_m, n_keys, diagonal, window_size, features)
    last_m = start_m + BLOCK_M - 1
    all_from, some_to = visible_keys(last_m, n_keys, diagonal, window_size, features)
    some_to = tl.where(start_m < seq_q, some_to, 0)
    if features.mask_block_size > 0:
        walk = _list_walk(entry, 0, some_to, call, BLOCK_N_MASKED, features)
    else:
        if features.documents:
            some_from = tl.maximum(some_from, tl.min(doc_start))
            all_from = tl.maximum(all_from, tl.max(doc_start))
        walk = _range_walk(some_from, all_from, all_to, some_to, call.seq_k, BLOCK_N)
    return start_m, offs_m, lower, upper, walk


@triton.jit
def key_tile_start(tile, head, call, BLOCK_N: tl.constexpr, features: tl.constexpr):
    """The first key of program number `tile` of a head, longest work first."""
    if features.mask_block_size > 0:
        start_n, _ = _mask_entry(head, tile, call, BLOCK_N, features)
        return start_n
    else:
        return tile * BLOCK_N


@triton.jit
def query_walk(
    tile, start_n, batch, head, doc_bounds_ptr, n_keys, call,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, features: tl.constexpr,
):  # fmt: skip
    """The walk over the queries of a head that see the keys of the tile at `start_n`.

    `doc_bounds_ptr` holds, for each batch and key tile, the query before which all documents begin
    at or before the tile's first key, and the one from which on all begin after its last.
    """
    seq_q, seq_k, window_size = call.seq_q, call.seq_k, call.window_size
    diagonal = seq_k - seq_q
    some_from, all_to = visible_queries(start_n, seq_q, diagonal, window_size, features)
    last_n = start_n + BLOCK_N - 1
    all_from, some_to = visible_queries(last_n, seq_q, diagonal, window_size, features)
    if features.mask_block_size > 0:
        _, entry = _mask_entry(head, tile, call, BLOCK_N, features)
        return _list_walk(entry, some_from, some_to, call, BLOCK_M, features)
    else:
        if features.documents:
            bounds = doc_bounds_ptr + (batch * tl.cdiv(seq_k, BLOCK_N) + tile) * 2
            all_to = tl.minimum(all_to, tl.load(bounds))
            some_to = tl.minimum(some_to, tl.load(bounds + 1))
        if features.lengths:
            all_to = tl.where(start_n + BLOCK_N <= n_keys, all_to, 0)
            some_to = tl.where(start_n < n_keys, some_to, 0)
        return _range_walk(some_from, all_from, all_to, some_to, seq_q, BLOCK_M)


@triton.jit
def walk_loop(walk, MASKED: tl.constexpr):
    """(begin, end, first block) of one of the two loops over a walk."""
    full_begin, full_end, full_block, masked_begin, masked_end, masked_block, _, _ = walk
    if MASKED:
        return masked_begin, masked_end, masked_block
    else:
        return full_begin, full_end, full_block


@triton.jit
def walk_tile(
    offset, end, block, walk, BLOCK: tl.constexpr, features: tl.constexpr, MASKED: tl.constexpr
):
    """Where in the sequence the tile begins that stands at `offset` of a walk.

    The next block of a list is read a step ahead, so that no load of a tile waits for its address.

    Returns:
        (start of the tile, block at the next offset).
    """
    _, _, _, _, _, _, gap_at, gap = walk
    if features.mask_block_size > 0:
        start = block * features.mask_block_size + offset % features.mask_block_size
        ahead = offset + BLOCK
        block = tl.load(gap_at + ahead // features.mask_block_size, mask=ahead < end, other=0)
        return tl.multiple_of(start, BLOCK), block
    elif MASKED:
        return offset + tl.where(offset >= gap_at, gap, 0), block
    else:
        return offset, block


@triton.jit
def in_view(key, lower, upper, features: tl.constexpr):
    """Which of these keys lie in [lower, upper); all three broadcast."""
    visible = key < upper
    if features.window or features.documents:
        visible = visible & (key >= lower)
    return visible


@triton.jit
def load_doc_start(batch, offs_m, call):
    """Where the documents of the queries `offs_m` begin; past the end, that of the last query."""
    row = tl.cast(batch, tl.int64) * call.seq_q
    return tl.load(call.doc_ptr + row + tl.minimum(offs_m, call.seq_q - 1))


@triton.jit
def _range_walk(some_from, all_from, all_to, some_to, limit, BLOCK: tl.constexpr):
    """The walk over a range: nothing is seen outside of [some_from, some_to), all is seen inside
    of [all_from, all_to), and the sequence has `limit` elements.
    """
    end = tl.maximum(tl.minimum(some_to, limit), 0)
    begin = tl.minimum(tl.maximum(some_from, 0), end) // BLOCK * BLOCK
    full_begin = tl.cdiv(tl.maximum(all_from, begin), BLOCK) * BLOCK
    full_end = tl.maximum(tl.minimum(all_to, end), 0) // BLOCK * BLOCK
    none = full_end <= full_begin
    full_begin = tl.where(none, begin, full_begin)
    full_end = tl.where(none, begin, full_end)
    gap = full_end - full_begin
    return full_begin, full_end, 0, begin, end - gap, 0, full_begin, gap


@triton.jit
def _list_walk(entry, some_from, some_to, call, BLOCK: tl.constexpr, features: tl.constexpr):
    """The walk over the list of `entry`: its full blocks, then its partial ones.

    Of a partial block that is the only one, as the diagonal of a causal mask is, the part outside
    of [some_from, some_to), that this tile does not see, is cut off.
    """
    size = features.mask_block_size
    full_end = tl.load(entry + 2) * size
    n_partial = tl.load(entry + 3)
    full_block = tl.load(entry + 4)
    partial_block = tl.load(entry + 5)
    begin = full_end
    end = full_end + n_partial * size
    if features.causal:
        before = tl.maximum(some_from - partial_block * size, 0) // BLOCK * BLOCK
        after = tl.maximum((partial_block + 1) * size - some_to, 0) // BLOCK * BLOCK
        begin += tl.where(n_partial == 1, before, 0)
        end -= tl.where(n_partial == 1, after, 0)
    blocks = call.blocks_ptr + tl.load(entry + 1)
    return 0, full_end, full_block, begin, end, partial_block, blocks, 0


@triton.jit
def _mask_entry(head, tile, call, BLOCK: tl.constexpr, features: tl.constexpr):
    """The entry of a head's `MaskLists.rows` (or `.cols`) for program number `tile`.

    Returns:
        (start of the tile in the sequence, pointer to the entry).
    """
    TILES: tl.constexpr = features.mask_block_size // BLOCK
    entry = call.lists_ptr + head * call.mask_head_stride + tile // TILES * ENTRY
    return tl.load(entry) * features.mask_block_size + tile % TILES * BLOCK, entry
