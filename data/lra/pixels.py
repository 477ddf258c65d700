"""Images to sequences of pixels, on the device where they are.

Everything has fixed shapes and waits for nothing, so that it can be part of a CUDA graph.
Shapes: B images, S pixels in a row, N = S * S, T tokens.
"""

import torch
from torch import Tensor

DIHEDRAL = 8  # ways to turn and mirror a square

TILE = (8, 16)
"""Rows and columns of the patches that `tile_order` reads one after the other: 128 pixels, as many
as a block of block-sparse attention."""


def dihedral(images: Tensor, codes: Tensor) -> Tensor:
    """Each image, (B, S, S), turned and mirrored in one of the 8 ways that keep a square.

    Codes are (B,) integers in [0, DIHEDRAL): bit 0 swaps top and bottom, bit 1 left and right, bit
    2 rows and columns. 0 leaves an image as it is.
    """
    rows, columns, both = ((codes >> bit & 1).bool()[:, None, None] for bit in range(3))
    images = torch.where(rows, images.flip(1), images)
    images = torch.where(columns, images.flip(2), images)
    return torch.where(both, images.mT, images)


def shifted(images: Tensor, codes: Tensor, most: int) -> Tensor:
    """Each image, (B, S, S), moved by up to `most` < S pixels in both directions.

    What comes in repeats the edge. Codes are (B,) integers in [0, (2 most + 1)^2), a row of them
    for each vertical move. 0 leaves an image as it is.
    """
    size, moves = images.shape[-1], 2 * most + 1
    pixels = torch.arange(size, device=images.device)

    def sources(codes: Tensor) -> Tensor:
        """(B, S) which row, or column, each one shows."""
        move = (codes + most) % moves - most  # 0, 1, ..., most, -most, ..., -1
        return (pixels + move[:, None]).clamp(0, size - 1)

    rows, columns = sources(codes // moves), sources(codes % moves)
    images = images.gather(1, rows[:, :, None].expand_as(images))
    return images.gather(2, columns[:, None, :].expand_as(images))


def tile_order(size: int, device: torch.device | str = "cpu") -> Tensor:
    """(N,) int64 places of all pixels (place = row * S + column), patch after patch.

    A block of attention then holds a patch of the image, not some rows of it. Rows and columns of
    patches come in the order of a Gray code: where both are powers of two, the numbers of patches
    side by side differ in a single bit, and a butterfly, which joins blocks whose numbers do, lets
    each patch see all four around it. Attention itself does not depend on the order where positions
    come with the tokens.

    Raises:
        ValueError: S is no multiple of both sides of TILE: the patches do not cover the image.
    """
    height, width = TILE
    if size % height or size % width:
        raise ValueError(
            f"an image of {size} x {size} pixels cannot be read in patches of {height} x {width}: "
            f"its side must be a multiple of {width}; read it row by row."
        )
    places = torch.arange(size * size, device=device)
    patches = places.view(size // height, height, size // width, width).transpose(1, 2)
    for dim in (0, 1):
        numbers = torch.arange(patches.shape[dim], device=device)
        # number i comes to place i XOR i // 2
        patches = patches.index_select(dim, (numbers ^ numbers >> 1).argsort())
    return patches.flatten()


def pack_pixels(
    pixels: Tensor, shown: Tensor, capacity: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Some pixels of each image, first, in their order; the others are left out.

    Long Range Arena's own code and Nystromformer's hide zero pixels from attention. Leaving these
    out is the same for all other pixels, at the cost of those alone.

    Args:
        pixels: (B, N) uint8.
        shown: (B, N) bool, which are tokens.
        capacity: T, tokens that an image may have.

    Returns:
        tokens (B, T) uint8, what stands beyond an image's length is arbitrary;
        lengths (B,) int32, at least 1 (an image of which nothing is shown keeps its last pixel) and
        at most T;
        places (B, T) int64, where in [0, N) each token stood;
        overflow, () bool: whether more than T of an image are shown, the last of which are lost.
    """
    counts = shown.cumsum(1, dtype=torch.int32)
    ranks = torch.arange(1, capacity + 1, dtype=torch.int32, device=pixels.device)
    ranks = ranks.expand(len(pixels), capacity).contiguous()
    # the k-th that is shown is the first at which the count reaches k
    places = torch.searchsorted(counts, ranks).clamp_(max=pixels.shape[1] - 1)
    found = counts[:, -1]
    tokens, lengths = pixels.gather(1, places), found.clamp(1, capacity)
    return tokens, lengths, places, (found > capacity).any()
