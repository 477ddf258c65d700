"""Key tiles of the forward pass: which a row tile visits, and which of them a group has to mask.

All groups of a team read the same ring of tiles, from the last key to the first. A group first
skips the tiles that none of its queries sees. It then masks some, sees some whole, and under a
window or packed documents masks the last ones again.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...triton.block_ranges import n_keys_of, visible_keys
from ..block_list import (
    block_list_row,
    block_list_tile,
    last_key_tile,
    n_key_tiles,
    number_of,
    parts_of,
)
from ..call import doc_starts
from ..scheduler import locate
from .plan import ROWS

M = gl.constexpr(ROWS)  # queries of a consumer group


@gluon.jit
def row_bounds(query, batch, call, plan: gl.constexpr):
    """[lower, upper): keys that `query` (vector or number) sees, without regard to documents."""
    features: gl.constexpr = plan.features
    n_keys = n_keys_of(batch, call, features)
    diagonal = call.seq_k - call.seq_q
    return visible_keys(query, n_keys, diagonal, call.window_size, features)


@gluon.jit
def _doc_range(start_m, batch, call):
    """Smallest and largest document start of M queries."""
    # Every warp holds all of them, so that no warp waits for another.
    layout: gl.constexpr = gl.BlockedLayout([M // 32], [32], [gl.num_warps()], [0])
    starts = doc_starts(start_m + gl.arange(0, M, layout=layout), batch, call)
    return gl.min(starts, 0), gl.max(starts, 0)


@gluon.jit
def row_tile_keys(start_m, batch, call, plan: gl.constexpr):
    """[first, end): the key tiles that the queries of a row tile see; at least one."""
    N: gl.constexpr = plan.block_n
    GROUPS: gl.constexpr = plan.groups
    end_m = gl.minimum(start_m + GROUPS * M, call.seq_q)
    lower, _ = row_bounds(start_m, batch, call, plan)
    _, upper = row_bounds(end_m - 1, batch, call, plan)
    # Producer and groups count the same stages, so a row tile that sees no key has one as well.
    end = gl.maximum(gl.cdiv(upper, N), 1)
    first = 0
    if plan.low:
        if plan.features.documents:
            least, _ = _doc_range(start_m, batch, call)
            for g in gl.static_range(1, GROUPS):
                next_least, _ = _doc_range(start_m + g * M, batch, call)
                least = gl.minimum(least, next_least)
            lower = gl.maximum(lower, least)
        first = gl.minimum(gl.maximum(lower, 0) // N, end - 1)
    return first, end


@gluon.jit
def row_of(tile, order, call, plan: gl.constexpr):
    """(first query, batch times heads, `Row` of a block list) of a work index."""
    if plan.has_block_list:
        row, batch_head = block_list_row(tile, order, call, plan)
        return row.number * (plan.groups * M), batch_head, row
    else:
        row_tile, batch_head = locate(tile, order, plan.features.causal)
        return row_tile * (plan.groups * M), batch_head, 0


@gluon.jit
def _block_list_group_tiles(own_m, row, batch, call, plan: gl.constexpr):
    """`group_tiles` under a block-sparse mask: tiles are positions in the block list."""
    N: gl.constexpr = plan.block_n
    TILES: gl.constexpr = plan.features.mask_block_size // N
    end = n_key_tiles(row, plan)
    skipped = 0
    # If the last block is on the diagonal, the group may see none of its last tiles. It keeps one.
    if plan.skips:
        _, upper = row_bounds(gl.minimum(own_m + M, call.seq_q) - 1, batch, call, plan)
        unseen = last_key_tile(row, plan) - gl.maximum(gl.cdiv(upper, N) - 1, 0)
        skipped = gl.minimum(gl.maximum(unseen, 0), gl.minimum(TILES, end) - 1)
    last = end - 1 - skipped
    high = 0
    # Partial blocks end the list, so they are visited first. The first tile is counted apart.
    if plan.cut > 1:
        high = gl.maximum(gl.minimum(row.n_partial * TILES - 1 - skipped, last), 0)
    return skipped, last, high, last - high, 0


@gluon.jit
def first_tile_of(skipped, last, row, plan: gl.constexpr):
    """`tile_of` the first key tile of a group, given the results of `group_tiles`."""
    tile = last
    if plan.has_block_list:
        tile = last_key_tile(row, plan) - skipped
    return number_of(tile, plan) * plan.block_n, parts_of(tile, plan)


@gluon.jit
def tile_of(key_tile, row, call, plan: gl.constexpr):
    """(first key, visible parts) of a key tile, given its number or position in a block list."""
    tile = key_tile
    if plan.has_block_list:
        tile = block_list_tile(key_tile, row, call, plan)
    return number_of(tile, plan) * plan.block_n, parts_of(tile, plan)


@gluon.jit
def group_tiles(start_m, row, cid: gl.constexpr, batch, call, plan: gl.constexpr):
    """Key tiles of group cid in the row tile at start_m, from the last one down.

    Returns:
        (skipped, last, high, whole, low): number of tiles that the group does not see at all; the
        first tile that it sees; then the numbers of tiles to mask, to see whole, and to mask again.
    """
    if plan.has_block_list:
        return _block_list_group_tiles(start_m + cid * M, row, batch, call, plan)
    else:
        N: gl.constexpr = plan.block_n
        first, end = row_tile_keys(start_m, batch, call, plan)
        own_m = start_m + cid * M
        # No bound falls from query to query, so the last query of the group has the greatest ones:
        # no query sees a key from `upper` on, and from `lower` on none hides an early key.
        lower, upper = row_bounds(gl.minimum(own_m + M, call.seq_q) - 1, batch, call, plan)
        last = end - 1
        if plan.skips:
            last = gl.maximum(gl.minimum(gl.cdiv(upper, N), end) - 1, first)
        rest = last - first
        high = 0
        # The first query has the least upper bound: a tile below it hides no late key.
        if plan.cut > 1:
            _, whole_to = row_bounds(own_m, batch, call, plan)
            high = gl.minimum(gl.maximum(last - gl.maximum(whole_to, 0) // N, 0), rest)
        low = 0
        if plan.low:
            # Document starts may come in any order, so take the greatest of the group.
            if plan.features.documents:
                _, greatest = _doc_range(own_m, batch, call)
                lower = gl.maximum(lower, greatest)
            whole_from = gl.maximum(gl.cdiv(gl.maximum(lower, 0), N), first)
            low = gl.minimum(gl.maximum(whole_from - first, 0), rest - high)
        return end - 1 - last, last, high, rest - high - low, low
