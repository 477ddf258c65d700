"""Small blocks packed into blocks of 64: their parts match the visible elements."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.mask.block_mask import BlockSparseMask
from tests.kernels.masks import elements, random_mask


@pytest.mark.parametrize("window_size", [None, 40])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("size", [16, 32])
def test_small_blocks_can_be_packed(size: int, causal: bool, window_size: int | None) -> None:
    mask = random_mask(230, 210, n_head=2, size=size)
    lists = mask.lists(230, 210, causal=causal, window_size=window_size, block_size=64)
    assert lists.packed and lists.block_size == 64
    assert not mask.lists(230, 210, causal=causal).packed
    visible = elements(mask, 230, 210, causal, window_size)
    visible = pad(visible, (0, 256 - 210, 0, 256 - 230))
    for head, entries in enumerate(lists.rows.tolist()):
        assert [n_full + n_partial for _, _, n_full, n_partial, *_ in entries] == sorted(
            (n_full + n_partial for _, _, n_full, n_partial, *_ in entries), reverse=True
        )
        for row, first, n_full, n_partial, _, _, last in entries:
            listed = lists.row_blocks[first : first + n_full + n_partial].tolist()
            assert last == (listed[-1] if listed else 0)
            tiles = visible[head, 64 * row : 64 * row + 64].split(64, dim=1)
            numbers = [x & 0xFFFF for x in listed]
            assert sorted(numbers) == [i for i, x in enumerate(tiles) if x.any()]
            for i, (number, entry) in enumerate(zip(numbers, listed, strict=True)):
                block = tiles[number]
                parts = block.unflatten(0, (4, 16)).unflatten(2, (4, 16)).transpose(1, 2)
                entry_parts = [(entry >> 16 >> bit) & 1 for bit in range(16)]
                assert entry_parts == blocks_with(parts.flatten(2).any(-1), size)
                # full blocks need no mask; queries past the end do not count
                assert i >= n_full or block[: 230 - 64 * row].all()


def blocks_with(parts: Tensor, size: int) -> list[int]:
    """Parts (4, 4) of 16, extended to all parts in the same block of the mask."""
    n = size // 16
    blocks = parts.unflatten(0, (-1, n)).unflatten(2, (-1, n)).transpose(1, 2).flatten(2).any(-1)
    return blocks.repeat_interleave(n, 0).repeat_interleave(n, 1).flatten().int().tolist()


def test_packing_is_limited_by_the_block_numbers() -> None:
    one_row = torch.zeros(1, 4 * 2**16, dtype=torch.bool)
    one_row[0, -1] = True
    lists = BlockSparseMask(one_row, 16).lists(1, 2**22, block_size=64)
    (entry,) = lists.row_blocks.tolist()
    assert entry & 0xFFFF == 2**16 - 1 and entry >> 16 == 0b1000
    longer = BlockSparseMask(torch.cat((one_row, one_row[:, :1]), dim=1), 16)
    with pytest.raises(ValueError, match="up to 4194304 tokens, got 4194305: use larger blocks"):
        longer.lists(1, 2**22 + 1, block_size=64)


def test_packed_fill() -> None:
    eye = torch.eye(8, dtype=torch.bool)
    assert [BlockSparseMask(eye, size).packed_fill for size in (16, 32, 64, 128)] == [4, 2, 1, 1]
    assert BlockSparseMask(eye & ~eye, 16).packed_fill == 16
    # at the end of a layout, a block of 64 contains fewer blocks
    assert BlockSparseMask(eye[:5, :5] | True, 16).packed_fill == 16
