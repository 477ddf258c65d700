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
    """Entry of a row of blocks in `MaskLists.rows`."""

    number: gl.tensor
    first: gl.tensor  # position of its first block in `MaskLists.row_blocks`
    n_full: gl.tensor
    n_partial: gl.tensor
    last: gl.tensor  # last block of its list


@gluon.jit
def block_list_row(tile, order, call, plan: gl.constexpr):
    """(`Row`, batch times heads) of a work index; past the end, of the last row."""
    # Rows are read ahead of their turn, also behind the last one.
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
    """Number of key tiles of a row; an empty row has one, which is masked as a whole."""
    TILES: gl.constexpr = plan.features.mask_block_size // plan.block_n
    return gl.maximum((row.n_full + row.n_partial) * TILES, 1)


@gluon.jit
def block_list_tile(position, row, call, plan: gl.constexpr):
    """Entry of the key tile at a position of a row; 0 at negative positions."""
    TILES: gl.constexpr = plan.features.mask_block_size // plan.block_n
    address = call.row_blocks_ptr + row.first + position // TILES
    # The producer reads one tile ahead, so the position after the last visit is -1.
    block = gl.load(address, mask=position >= 0, other=0)
    return block if plan.features.packed else block * TILES + position % TILES


@gluon.jit
def last_key_tile(row, plan: gl.constexpr):
    """Entry of the key tile at the last position, which is visited first; 0 if the row is empty."""
    TILES: gl.constexpr = plan.features.mask_block_size // plan.block_n
    # The row's own entry has its last block, which saves a load that waits for another.
    last = row.last * TILES + (n_key_tiles(row, plan) - 1) % TILES
    return row.last if plan.features.packed else last


@gluon.jit
def number_of(entry, plan: gl.constexpr):
    """Number of a tile, from its entry."""
    return entry & 0xFFFF if plan.features.packed else entry


@gluon.jit
def parts_of(entry, plan: gl.constexpr):
    """Visible parts of a tile, 16 bits, from its entry."""
    return (entry >> 16) & 0xFFFF if plan.features.packed else ALL_PARTS


@gluon.jit
def in_parts(parts, query, key):
    """Whether each pair of query and key, counted within the block, is in a visible part."""
    return (parts >> (query // PART * 4 + key // PART)) & 1 > 0
