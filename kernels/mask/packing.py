"""Blocks of 16 and 32 packed into blocks of 64, with a bit for each part of 16 queries and 16 keys.

For kernels whose smallest product has 64 queries and 64 keys.
"""

import itertools

import torch
from torch import Tensor
from torch.nn.functional import pad

PACKED_BLOCK = 64
MOST_PACKED = 2**16  # in a row or a column: their numbers have 16 bits
PART = 16
ALL_PARTS = 2**16 - 1


def parts_of(blocks: Tensor, block_size: int) -> Tensor:
    """Which parts of blocks of 64 lie in smaller ones.

    Args:
        blocks: (H_m, n, m) bool, blocks of 16 or 32.

    Returns:
        (H_m, ceil(n / k), ceil(m / k)) int64 for k of them in a row of a block of 64: bit 4 i + j
        for queries from 16 i and keys from 16 j on.
    """
    k, copies = PACKED_BLOCK // block_size, block_size // PART
    blocks = pad(blocks, (0, -blocks.shape[2] % k, 0, -blocks.shape[1] % k))
    parts = torch.zeros_like(blocks[:, ::k, ::k], dtype=torch.int64)
    for i, j in itertools.product(range(4), repeat=2):
        parts += blocks[:, i // copies :: k, j // copies :: k].long() << 4 * i + j
    return parts


def with_parts(numbers: Tensor, parts: Tensor) -> Tensor:
    """Numbers of blocks of 64, below MOST_PACKED, with parts in the upper 16 of 32 bits: int64."""
    return numbers + (parts << 16)


def packed_fill(layout: Tensor, block_size: int) -> float:
    """How many blocks of a layout (H_m, n, m) lie in a block of 64 that has one: the mean, were no
    block cut by the end of the layout. It is 1 where blocks are not smaller, and where there is no
    block as many as fit."""
    if block_size >= PACKED_BLOCK:
        return 1.0
    k = PACKED_BLOCK // block_size
    packed = parts_of(layout, block_size) > 0
    if not packed.any():
        return float(k * k)
    _, n, m = layout.shape
    there = sum(
        packed[:, : -(-(n - i) // k), : -(-(m - j) // k)].sum()
        for i, j in itertools.product(range(k), repeat=2)
    )
    return (k * k * layout.sum() / there).item()
