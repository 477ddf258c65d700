"""Pack blocks of 16 and 32 into blocks of 64, with a bit for each part of 16 queries and 16 keys.

This is for kernels whose smallest tile has 64 queries and 64 keys.
"""

import itertools

import torch
from torch import Tensor
from torch.nn.functional import pad

PACKED_BLOCK = 64
MAX_PACKED = 2**16  # maximum number of blocks in a row or a column: block numbers have 16 bits
PART = 16
ALL_PARTS = 2**16 - 1


def parts_of(blocks: Tensor, block_size: int) -> Tensor:
    """Bit mask, for each block of 64, of the parts that smaller blocks cover.

    Args:
        blocks: (H_m, n, m) bool, blocks of 16 or 32.

    Returns:
        (H_m, ceil(n / k), ceil(m / k)) int64, with k = 64 / block_size: bit 4 i + j stands for the
        queries from 16 i and the keys from 16 j on.
    """
    k, copies = PACKED_BLOCK // block_size, block_size // PART
    blocks = pad(blocks, (0, -blocks.shape[2] % k, 0, -blocks.shape[1] % k))
    parts = torch.zeros_like(blocks[:, ::k, ::k], dtype=torch.int64)
    for i, j in itertools.product(range(4), repeat=2):
        parts += blocks[:, i // copies :: k, j // copies :: k].long() << 4 * i + j
    return parts


def with_parts(numbers: Tensor, parts: Tensor) -> Tensor:
    """Block numbers, below MAX_PACKED, with the parts in the upper 16 of 32 bits: int64."""
    return numbers + (parts << 16)


def pack_blocks(
    full: Tensor, partial: Tensor, layout: Tensor, block_size: int, longest: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pack (H_m, n, m) bool tensors of blocks of 16 or 32; a block of 64 is full if all parts are.

    `longest` is the larger of the numbers of queries and keys.

    Returns:
        full, partial and layout in blocks of 64, and the parts of full and partial blocks.

    Raises:
        ValueError: there are more blocks of 64 than MAX_PACKED.
    """
    if longest > MAX_PACKED * PACKED_BLOCK:
        raise ValueError(
            f"blocks of {block_size} are packed into blocks of {PACKED_BLOCK} up to "
            f"{MAX_PACKED * PACKED_BLOCK} tokens, got {longest}: use larger blocks"
        )
    parts = parts_of(full | partial, block_size)
    full = parts_of(full, block_size) == ALL_PARTS
    return full, (parts > 0) & ~full, parts_of(layout, block_size) > 0, parts


def packed_fill(layout: Tensor, block_size: int) -> float:
    """Mean number of visible blocks of a layout (H_m, n, m) in a block of 64 that has at least one.

    A block of 64 that the end of the layout cuts counts as if it were whole. The result is 1 if
    blocks are not smaller than 64, and the number that fits for an empty layout.
    """
    if block_size >= PACKED_BLOCK:
        return 1.0
    k = PACKED_BLOCK // block_size
    packed = parts_of(layout, block_size) > 0
    if not packed.any():
        return float(k * k)
    # Scale up the mean over the small blocks that exist within those of 64: the end of the layout
    # must not lower it.
    _, n, m = layout.shape
    n_present = sum(
        packed[:, : -(-(n - i) // k), : -(-(m - j) // k)].sum()
        for i, j in itertools.product(range(k), repeat=2)
    )
    return (k * k * layout.sum() / n_present).item()
