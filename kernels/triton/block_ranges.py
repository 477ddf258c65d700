"""Tile iteration: which key tiles a tile of queries sees, and which query tiles see a tile of keys.

Without a block-sparse mask, each query sees one interval of keys: causal masks and padding limit
its end, windows and packed documents its start. A program then visits a range of tiles. All queries
see the tiles in the middle, which need no mask; in the others, a mask costs two comparisons. With a
block-sparse mask, the tiles come from a list of blocks.

`features` is `kernels.options.Features`.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..mask.lists import ENTRY_NUMBERS

ENTRY = tl.constexpr(ENTRY_NUMBERS)
# Kernel arguments for which Triton must not compile again if they are 1 or multiples of 16.
UNSPECIALIZED = [
    *("n_tiles", "seq_q", "seq_k", "window_size", "mask_head_stride", "threshold", "first_query")
]


class Call(NamedTuple):
    """Arguments that all programs of a launch share; pointers are None where a feature is off."""

    seq_q: tl.tensor
    seq_k: tl.tensor
    window_size: tl.tensor
    scale_log2: tl.tensor
    softcap_scale: tl.tensor
    keep_scale: tl.tensor
    threshold: tl.tensor
    first_query: tl.tensor
    seed_ptr: tl.tensor
    doc_ptr: tl.tensor
    lengths_ptr: tl.tensor
    lists_ptr: tl.tensor  # block-sparse mask: `MaskLists.rows` or `.cols`
    blocks_ptr: tl.tensor  # and `MaskLists.row_blocks` or `.col_blocks`
    mask_head_stride: tl.tensor


class BlockRange(NamedTuple):
    """Tiles that a program visits, in two loops: full tiles need no mask, masked ones do.

    A loop counts offsets in elements, from begin to end; `tile_start` maps an offset to a position
    in the sequence. Without a block-sparse mask the masked tiles lie on both sides of the full ones
    (the gap). With one, offsets count through the blocks of a list.
    """

    full_begin: tl.tensor
    full_end: tl.tensor
    full_block: tl.tensor  # first block of the loop; block-sparse masks only
    masked_begin: tl.tensor
    masked_end: tl.tensor
    masked_block: tl.tensor
    gap_at: tl.tensor  # masked offsets from here on skip `gap` elements
    gap: tl.tensor
    blocks_ptr: tl.tensor  # the list; block-sparse masks only


@triton.jit
def visible_keys(query, n_keys, diagonal, window_size, features: tl.constexpr):
    """Interval [lower, upper) of keys that `query` sees; ignores documents and block-sparse masks.

    The key position of a query is `query + diagonal`, with diagonal = seq_k - seq_q.
    """
    position = query + diagonal
    # query may be a vector or a scalar: a product with 0 gives the bounds its shape.
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
    """Interval [first, end) of queries that see `key`; ignores documents and block-sparse masks."""
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
    """Number of keys in this sequence, without padding."""
    if features.lengths:
        return tl.minimum(call.seq_k, tl.load(call.lengths_ptr + batch))
    else:
        return call.seq_k


@triton.jit
def key_range(
    tile, n_tiles, batch, head, call, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_N_MASKED: tl.constexpr, features: tl.constexpr,
):  # fmt: skip
    """Query tile of the program `tile` (of `n_tiles` of a head), and the key tiles that it sees.

    Returns:
        (start_m, offs_m (M,), lower (M,), upper (M,), BlockRange): within the tiles of the range,
        query m sees the keys [lower, upper).
    """
    seq_q, window_size = call.seq_q, call.window_size
    diagonal = call.seq_k - seq_q
    n_keys = n_keys_of(batch, call, features)
    # Longest work first, so that no long tile starts last: under a causal mask the last rows see
    # the most keys, and a block-sparse mask lists its rows in this order.
    if features.mask_block_size > 0:
        start_m, entry = mask_entry(head, tile, call, BLOCK_M, features)
    else:
        start_m = (n_tiles - 1 - tile) * BLOCK_M
    offs_m = start_m + tl.arange(0, BLOCK_M)

    # The interval of each query, with which the masked loop compares keys.
    lower, upper = visible_keys(offs_m, n_keys, diagonal, window_size, features)
    if features.documents:
        doc_start = load_doc_start(batch, offs_m, call)
        lower = tl.maximum(lower, doc_start)

    # Intervals move with the query, so those of the first and the last query bound the tile's: some
    # query sees a key of [some_from, some_to), and all queries see all of [all_from, all_to).
    some_from, all_to = visible_keys(start_m, n_keys, diagonal, window_size, features)
    last_m = start_m + BLOCK_M - 1
    all_from, some_to = visible_keys(last_m, n_keys, diagonal, window_size, features)
    # Rows may be padded to whole blocks: a tile that starts past the last query visits nothing.
    some_to = tl.where(start_m < seq_q, some_to, 0)
    if features.mask_block_size > 0:
        block_range = _sparse_range(entry, 0, some_to, call, BLOCK_N_MASKED, features)
    else:
        if features.documents:
            some_from = tl.maximum(some_from, tl.min(doc_start))
            all_from = tl.maximum(all_from, tl.max(doc_start))
        block_range = _dense_range(some_from, all_from, all_to, some_to, call.seq_k, BLOCK_N)
    return start_m, offs_m, lower, upper, block_range


@triton.jit
def query_range(
    tile, start_n, batch, head, doc_bounds_ptr, n_keys, call,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, features: tl.constexpr,
):  # fmt: skip
    """Query tiles of a head that see the key tile at `start_n`, as a BlockRange.

    `doc_bounds_ptr`: `tiles` from `kernels.triton.document_bounds`.
    """
    seq_q, seq_k, window_size = call.seq_q, call.seq_k, call.window_size
    diagonal = seq_k - seq_q
    # The same bounds as in `key_range`, solved for the queries.
    some_from, all_to = visible_queries(start_n, seq_q, diagonal, window_size, features)
    last_n = start_n + BLOCK_N - 1
    all_from, some_to = visible_queries(last_n, seq_q, diagonal, window_size, features)
    if features.mask_block_size > 0:
        _, entry = mask_entry(head, tile, call, BLOCK_N, features)
        return _sparse_range(entry, some_from, some_to, call, BLOCK_M, features)
    else:
        if features.documents:
            # Documents may come in any order, so bounds cannot be read off a tile's first and last
            # query: another kernel has reduced them over all queries.
            bounds = doc_bounds_ptr + (batch * tl.cdiv(seq_k, BLOCK_N) + tile) * 2
            all_to = tl.minimum(all_to, tl.load(bounds))
            some_to = tl.minimum(some_to, tl.load(bounds + 1))
        if features.lengths:
            # Padding hides keys from all queries: a tile that reaches into it has no full tiles.
            all_to = tl.where(start_n + BLOCK_N <= n_keys, all_to, 0)
            some_to = tl.where(start_n < n_keys, some_to, 0)
        return _dense_range(some_from, all_from, all_to, some_to, seq_q, BLOCK_M)


@triton.jit
def loop_bounds(block_range, MASKED: tl.constexpr):
    """(begin, end, first block) of one of the two loops over a BlockRange."""
    if MASKED:
        return block_range.masked_begin, block_range.masked_end, block_range.masked_block
    else:
        return block_range.full_begin, block_range.full_end, block_range.full_block


@triton.jit
def tile_start(
    offset, end, block, block_range, BLOCK: tl.constexpr, features: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """First element of the tile at `offset` of a loop, and the mask block of the next tile.

    `block` is the mask block of this tile. Without a block-sparse mask, block numbers are unused.
    """
    if features.mask_block_size > 0:
        # Read the next block number one tile ahead: otherwise the loads of each tile would wait for
        # the load of their address.
        start = block * features.mask_block_size + offset % features.mask_block_size
        ahead = offset + BLOCK
        inside = ahead < end
        next_block = block_range.blocks_ptr + ahead // features.mask_block_size
        return tl.multiple_of(start, BLOCK), tl.load(next_block, mask=inside, other=0)
    elif MASKED:
        return offset + tl.where(offset >= block_range.gap_at, block_range.gap, 0), block
    else:
        return offset, block


@triton.jit
def is_visible(key, lower, upper, features: tl.constexpr):
    """Mask of the keys in [lower, upper); all three broadcast."""
    visible = key < upper
    if features.window or features.documents:
        visible = visible & (key >= lower)
    return visible


@triton.jit
def load_doc_start(batch, offs_m, call):
    """First key of the document of each query; queries past the end take the last query's."""
    row = tl.cast(batch, tl.int64) * call.seq_q
    # Clamped rather than masked: a default of 0 would widen the bounds of a tile at the end.
    return tl.load(call.doc_ptr + row + tl.minimum(offs_m, call.seq_q - 1))


@triton.jit
def _dense_range(some_from, all_from, all_to, some_to, limit, BLOCK: tl.constexpr):
    """BlockRange of a sequence of `limit` elements, from the two intervals of `key_range`."""
    # All tiles that hold something visible, and among them the full ones; `none` if there are none.
    end = tl.maximum(tl.minimum(some_to, limit), 0)
    begin = tl.minimum(tl.maximum(some_from, 0), end) // BLOCK * BLOCK
    full_begin = tl.cdiv(tl.maximum(all_from, begin), BLOCK) * BLOCK
    full_end = tl.maximum(tl.minimum(all_to, end), 0) // BLOCK * BLOCK
    none = full_end <= full_begin
    full_begin = tl.where(none, begin, full_begin)
    full_end = tl.where(none, begin, full_end)
    # The masked loop counts through the tiles before and after the full ones as if they were
    # adjacent, and `tile_start` skips the gap: one loop body is compiled instead of two.
    gap = full_end - full_begin
    # 0 for the missing list: in Triton 3.6, a jit function cannot return None.
    return BlockRange(full_begin, full_end, 0, begin, end - gap, 0, full_begin, gap, 0)


@triton.jit
def _sparse_range(entry, some_from, some_to, call, BLOCK: tl.constexpr, features: tl.constexpr):
    """BlockRange of the list of a mask entry: its full blocks, then its partial ones."""
    size = features.mask_block_size
    # An entry holds its first blocks as well, so that no loop waits for a load from the list.
    full_end, n_partial = tl.load(entry + 2) * size, tl.load(entry + 3)
    full_block, partial_block = tl.load(entry + 4), tl.load(entry + 5)
    begin, end = full_end, full_end + n_partial * size
    if features.causal:
        # A single partial block is the diagonal's: cut off its tiles outside of the interval
        # [some_from, some_to) that this tile sees.
        before = tl.maximum(some_from - partial_block * size, 0) // BLOCK * BLOCK
        after = tl.maximum((partial_block + 1) * size - some_to, 0) // BLOCK * BLOCK
        begin += tl.where(n_partial == 1, before, 0)
        end -= tl.where(n_partial == 1, after, 0)
    blocks_ptr = call.blocks_ptr + tl.load(entry + 1)
    return BlockRange(0, full_end, full_block, begin, end, partial_block, 0, 0, blocks_ptr)


@triton.jit
def mask_entry(head, tile, call, BLOCK: tl.constexpr, features: tl.constexpr):
    """Position of program `tile` of a head, and a pointer to its `MaskLists.rows` or `.cols` entry.

    A block of the mask may hold several tiles, which share the entry.
    """
    TILES: tl.constexpr = features.mask_block_size // BLOCK
    entry = call.lists_ptr + head * call.mask_head_stride + tile // TILES * ENTRY
    return tl.load(entry) * features.mask_block_size + tile % TILES * BLOCK, entry
