"""Convert images to sequences of pixels on their device.

All functions have fixed shapes and do not synchronize, so they can be captured in a CUDA graph.
Shapes: B images, S pixels in a row, N = S * S, T tokens.
"""

import torch
from torch import Tensor

DIHEDRAL = 8  # rotations and reflections of a square

TILE = (8, 16)
"""Rows and columns of the patches of `tile_order`: 128 pixels, the size of a block of block-sparse
attention."""


def dihedral(images: Tensor, codes: Tensor) -> Tensor:
    """Rotate and reflect each image, (B, S, S), by one of the 8 symmetries of a square.

    Codes are (B,) integers in [0, DIHEDRAL): bit 0 swaps top and bottom, bit 1 left and right, bit
    2 rows and columns. Code 0 is the identity.
    """
    flip_rows, flip_columns, transpose = (
        (codes >> bit & 1).bool()[:, None, None] for bit in range(3)
    )
    images = torch.where(flip_rows, images.flip(1), images)
    images = torch.where(flip_columns, images.flip(2), images)
    return torch.where(transpose, images.mT, images)


def shifted(images: Tensor, codes: Tensor, most: int) -> Tensor:
    """Shift each image, (B, S, S), by up to `most` < S pixels in both directions.

    Edge pixels are repeated to fill the gap. Codes are (B,) integers in [0, (2 most + 1)^2): the
    vertical shift varies slowest. Code 0 is the identity.
    """
    size, n_shifts = images.shape[-1], 2 * most + 1
    pixels = torch.arange(size, device=images.device)

    def sources(codes: Tensor) -> Tensor:
        """Source row (or column) of each row (or column), (B, S)."""
        shift = (codes + most) % n_shifts - most  # 0, 1, ..., most, -most, ..., -1
        return (pixels + shift[:, None]).clamp(0, size - 1)

    rows, columns = sources(codes // n_shifts), sources(codes % n_shifts)
    images = images.gather(1, rows[:, :, None].expand_as(images))
    return images.gather(2, columns[:, None, :].expand_as(images))


def tile_order(size: int, device: torch.device | str = "cpu") -> Tensor:
    """Positions of all pixels (row * S + column) in patch order, (N,) int64.

    A block of attention then holds a patch of the image instead of some rows. Rows and columns of
    patches follow a Gray code. If both counts are powers of two, the indices of adjacent patches
    differ in a single bit. A butterfly mask joins the blocks whose indices differ in one bit, so
    each patch attends to its four neighbours. Attention itself does not depend on the order if
    positions are passed with the tokens.

    Raises:
        ValueError: S is not a multiple of both sides of TILE, so the patches do not cover the
            image.
    """
    height, width = TILE
    if size % height or size % width:
        raise ValueError(
            f"an image of {size} x {size} pixels cannot be read in patches of {height} x {width}: "
            f"its side must be a multiple of {width}. Try data.order=raster."
        )
    positions = torch.arange(size * size, device=device)
    patches = positions.view(size // height, height, size // width, width).transpose(1, 2)
    for dim in (0, 1):
        indices = torch.arange(patches.shape[dim], device=device)
        # index i moves to i XOR i // 2, its Gray code
        patches = patches.index_select(dim, (indices ^ indices >> 1).argsort())
    return patches.flatten()


def pack_pixels(
    pixels: Tensor, visible: Tensor, capacity: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Move the visible pixels of each image to the front, in order, and drop the others.

    The code of Long Range Arena and of Nystromformer hides zero pixels from attention. Dropping
    them gives the same result for all other pixels, and only these are computed.

    Args:
        pixels: (B, N) uint8.
        visible: (B, N) bool, pixels that become tokens.
        capacity: T, maximum number of tokens of an image.

    Returns:
        tokens (B, T) uint8, arbitrary beyond an image's length;
        lengths (B,) int32, in [1, T]; an image without visible pixels keeps its last pixel;
        positions (B, T) int64, pixel index in [0, N) of each token;
        overflow, () bool: whether an image has more than T visible pixels; the last are dropped.
    """
    counts = visible.cumsum(1, dtype=torch.int32)
    ranks = torch.arange(1, capacity + 1, dtype=torch.int32, device=pixels.device)
    ranks = ranks.expand(len(pixels), capacity).contiguous()
    # the k-th visible pixel is the first one at which the count reaches k
    positions = torch.searchsorted(counts, ranks).clamp_(max=pixels.shape[1] - 1)
    n_visible = counts[:, -1]
    tokens, lengths = pixels.gather(1, positions), n_visible.clamp(1, capacity)
    return tokens, lengths, positions, (n_visible > capacity).any()
