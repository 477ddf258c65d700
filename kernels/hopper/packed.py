"""Blocks of 64 that hold smaller ones: what a number says in a packed list, as
`kernels.mask_packing` puts it there. In other lists it is the number of a block, and no more."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .. import mask_packing

PART = gl.constexpr(mask_packing.PART)
ALL_PARTS = gl.constexpr(mask_packing.ALL_PARTS)


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
