"""Block lists of the forward pass: the key tiles of a row of blocks of a block-sparse mask.

A row tile is a row of blocks. Its key tiles have positions from 0 on, in the order of the list:
full blocks before partial ones, ascending in a block. They are visited from the last position to
the first, as key tiles are without a mask, so that the tiles to mask come first. In a packed list
an entry holds the number of a block and 16 bits for its parts (`parts_of`).
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
    """Entry of a row of blocks."""

    number: gl.tensor
    first: gl.tensor  # start of its list
    n_full: gl.tensor
    n_partial: gl.tensor
    last: gl.tensor  # the last block of its list


@gluon.jit
def block_list_row(tile, order, call, plan: gl.constexpr):
    """(`Row` of a work index, batch times heads); past the end, the last row."""
    tile = gl.minimum(tile, order.n_tiles * order.n_heads - 1)
    rest, batch_head = locate(tile, order, True)
    position = order.n_tiles - 1 - rest  # in the list of rows, longest first
    head = batch_head % call.n_head
    entry = call.rows_ptr + (head * call.mask_stride + position * ENTRY)
    row = Row(
        gl.load(entry), gl.load(entry + 1), gl.load(entry + 2), gl.load(entry + 3),
        gl.load(entry + 6),
    )  # fmt: skip
    return row, batch_head


@gluon.jit
def n_key_tiles(row, plan: gl.constexpr):
    """How many key tiles are visited: at least one, which is masked if the row sees none."""
    TILES: gl.constexpr = plan.features.mask_block_size // plan.block_n
    return gl.maximum((row.n_full + row.n_partial) * TILES, 1)


@gluon.jit
def block_list_tile(position, row, call, plan: gl.constexpr):
    """Entry of the key tile at a position of a row; 0 below the first one."""
    TILES: gl.constexpr = plan.features.mask_block_size // plan.block_n
    address = call.row_blocks_ptr + row.first + position // TILES
    block = gl.load(address, mask=position >= 0, other=0)
    return block if plan.features.packed else block * TILES + position % TILES


@gluon.jit
def last_key_tile(row, plan: gl.constexpr):
    """Entry of the key tile that is visited first, at the last position; 0 of an empty row."""
    TILES: gl.constexpr = plan.features.mask_block_size // plan.block_n
    last = row.last * TILES + (n_key_tiles(row, plan) - 1) % TILES
    return row.last if plan.features.packed else last


@gluon.jit
def number_of(entry, plan: gl.constexpr):
    """Number of a tile, from its entry."""
    return entry & 0xFFFF if plan.features.packed else entry


@gluon.jit
def parts_of(entry, plan: gl.constexpr):
    """Which parts of a tile are visible, from its entry: 16 bits."""
    return (entry >> 16) & 0xFFFF if plan.features.packed else ALL_PARTS


@gluon.jit
def in_parts(parts, query, key):
    """Whether queries and keys, vectors of numbers within the block, meet in one of its parts."""
    return (parts >> (query // PART * 4 + key // PART)) & 1 > 0
