"""Images to sequences: turned, packed and read in patches, against plain loops."""

import pytest
import torch

from data.lra.pixels import TILE, dihedral, pack_pixels, shifted, tile_order
from kernels.mask.patterns import butterfly


def test_the_eight_changes_are_those_of_a_square() -> None:
    image = torch.arange(9).view(1, 3, 3)
    images = [dihedral(image, torch.tensor([code]))[0] for code in range(8)]
    assert torch.equal(images[0], image[0])
    assert torch.equal(images[1], image[0].flip(0))
    assert torch.equal(images[2], image[0].flip(1))
    assert torch.equal(images[4], image[0].T)
    turned = {torch.rot90(x, k).flatten().tolist().__str__() for x in image for k in range(4)}
    mirrored = {torch.rot90(image[0].T, k).flatten().tolist().__str__() for k in range(4)}
    assert {x.flatten().tolist().__str__() for x in images} == turned | mirrored


def test_each_image_has_its_own_change() -> None:
    images = torch.rand(8, 5, 5)
    codes = torch.tensor([3, 0, 7, 1, 4, 2, 6, 5])
    together = dihedral(images, codes)
    for i in range(8):
        assert torch.equal(together[i], dihedral(images[i : i + 1], codes[i : i + 1])[0])


def test_images_are_moved_and_their_edges_repeated() -> None:
    most, size = 2, 5
    moves = 2 * most + 1
    image = torch.rand(size, size)
    codes = torch.arange(moves**2)
    images = shifted(image.expand(len(codes), size, size), codes, most)
    assert torch.equal(images[0], image)
    padded = torch.nn.functional.pad(image[None, None], [most] * 4, mode="replicate")[0, 0]
    windows = padded.unfold(0, size, 1).unfold(1, size, 1).flatten(0, 1)  # all 25 moves
    assert {str(x.tolist()) for x in images} == {str(x.tolist()) for x in windows}
    # each image by its own code, rows of codes for rows
    down, right = images[moves], images[1]
    assert torch.equal(down[:-1], image[1:]) and torch.equal(down[-1], image[-1])
    assert torch.equal(right[:, :-1], image[:, 1:]) and torch.equal(right[:, -1], image[:, -1])


@pytest.mark.parametrize("size", [16, 32, 48, 96, 128])
def test_tiles_cover_the_image_block_by_block(size: int) -> None:
    order = tile_order(size)
    assert torch.equal(order.sort().values, torch.arange(size * size))
    height, width = TILE
    for start in range(0, size * size, height * width):
        block = order[start : start + height * width]
        rows, columns = block // size, block % size
        assert rows.max() - rows.min() == height - 1
        assert columns.max() - columns.min() == width - 1


@pytest.mark.parametrize("size", [64, 128, 256])
def test_a_butterfly_lets_each_tile_see_those_around_it(size: int) -> None:
    height, width = TILE
    first = tile_order(size).view(-1, height * width)[:, 0]  # of each block, its upper left pixel
    rows, columns = first // size // height, first % size // width
    side_by_side = (rows[:, None] - rows).abs() + (columns[:, None] - columns).abs() <= 1
    assert butterfly(len(first))[side_by_side].all()


def test_tiles_must_fit() -> None:
    with pytest.raises(ValueError, match=r"24 x 24 .* patches of 8 x 16: .* multiple of 16"):
        tile_order(24)


@pytest.mark.parametrize("share", [0.0, 0.03, 0.5])
def test_packing_keeps_the_ink_in_order(share: float) -> None:
    generator = torch.Generator().manual_seed(0)
    shown = torch.rand(7, 100, generator=generator) < share
    pixels = torch.randint(1, 256, (7, 100), generator=generator).mul(shown).to(torch.uint8)
    tokens, lengths, positions, overflow = pack_pixels(pixels, pixels > 0, 80)
    assert not overflow
    assert tokens.shape == positions.shape == (7, 80)
    for i in range(7):
        ink = pixels[i].nonzero().flatten()
        n = max(1, len(ink))
        assert lengths[i] == n
        assert torch.equal(positions[i, : len(ink)], ink)
        assert torch.equal(tokens[i, : len(ink)], pixels[i, ink])
        if len(ink) == 0:
            assert tokens[i, 0] == 0


def test_pixels_without_room_are_reported() -> None:
    pixels = torch.zeros(2, 10, dtype=torch.uint8)
    pixels[1, 3:8] = 9
    assert not pack_pixels(pixels, pixels > 0, 5)[-1]
    tokens, lengths, _, overflow = pack_pixels(pixels, pixels > 0, 4)
    assert overflow
    assert lengths.tolist() == [1, 4]
    assert tokens[1].tolist() == [9] * 4
