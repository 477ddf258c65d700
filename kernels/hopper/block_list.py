"""The rows of a block-sparse mask, as the Hopper forward walks them.

A row tile is a row of blocks, and its key tiles are those of its blocks. They have numbers here,
places, from 0 on: the order of the list, full blocks before partial ones, and ascending in a block.
They are visited from the last to the first, as key tiles are without a mask, so that the tiles to
mask come first. In a packed list the number of a tile has its parts with it
(`parts_of`).
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..mask import packing
from ..mask.lists import ENTRY_NUMBERS
from .scheduler import locate

ENTRY = gl.constexpr(ENTRY_NUMBERS)
PART = gl.constexpr(packing.PART)
ALL_PARTS = gl.constexpr(packing.ALL_PARTS)


class Row(NamedTuple):
    """A row of blocks: what its entry says."""

    number: gl.tensor
    first: gl.tensor  # where its list begins
    n_full: gl.tensor
    n_partial: gl.tensor
    last: gl.tensor  # the last block of its list


@gluon.jit
def block_list_row(tile, order, call, plan: gl.constexpr):
    """(the row with this tile number, batch times heads); of a number too high, the last row."""
    tile = gl.minimum(tile, order.n_tiles * order.n_heads - 1)
    place, batch_head = locate(tile, order, True)
    position = order.n_tiles - 1 - place  # in the list of rows, longest first
    head = batch_head % call.n_head
    entry = call.rows_ptr + (head * call.mask_stride + position * ENTRY)
    row = Row(
        gl.load(entry),
        gl.load(entry + 1),
        gl.load(entry + 2),
        gl.load(entry + 3),
        gl.load(entry + 6),
    )
    return row, batch_head


@gluon.jit
def n_key_tiles(row, plan: gl.constexpr):
    """How many key tiles are visited: at least one, hidden if the row sees none."""
    TILES: gl.constexpr = plan.features.mask_block_size // plan.block_n
    return gl.maximum((row.n_full + row.n_partial) * TILES, 1)


@gluon.jit
def block_list_tile(place, row, call, plan: gl.constexpr):
    """The number of the key tile in this place of a row; 0 below the first place."""
    TILES: gl.constexpr = plan.features.mask_block_size // plan.block_n
    there = place >= 0
    block = gl.load(call.row_blocks_ptr + row.first + place // TILES, mask=there, other=0)
    return block if plan.features.packed else block * TILES + place % TILES


@gluon.jit
def last_key_tile(row, plan: gl.constexpr):
    """The number of the key tile that is visited first, in the last place; 0 of an empty row."""
    TILES: gl.constexpr = plan.features.mask_block_size // plan.block_n
    last = row.last * TILES + (n_key_tiles(row, plan) - 1) % TILES
    return row.last if plan.features.packed else last


# ---- packed lists


@gluon.jit
def number_of(entry, plan: gl.constexpr):
    """The number of the block, which may have parts."""
    if plan.features.packed:
        return entry & 0xFFFF
    else:
        return entry


@gluon.jit
def parts_of(entry, plan: gl.constexpr):
    """Which parts of the block are there: 16 bits."""
    if plan.features.packed:
        return (entry >> 16) & 0xFFFF
    else:
        return ALL_PARTS


@gluon.jit
def in_parts(parts, query, key):
    """Whether queries and keys, vectors of numbers within the block, meet in one of its parts."""
    return (parts >> (query // PART * 4 + key // PART)) & 1 > 0
