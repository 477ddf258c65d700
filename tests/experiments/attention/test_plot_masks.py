"""The picture of masks: the colour of each block against the mask, element by element."""

import pytest
import torch

from experiments.attention import plot_masks
from experiments.attention.plot_masks import BLOCK_SIZE, FULL, HIDDEN, SEEN, SEQ_LEN, SKIPPED
from kernels.reference.standard import visible_keys

MASKS = plot_masks.masks()


@pytest.mark.parametrize("title", MASKS)
def test_colours_of_blocks_are_what_the_mask_shows(title):
    visible = visible_keys(SEQ_LEN, SEQ_LEN, **MASKS[title])[0, 0]
    picture = plot_masks.picture(MASKS[title])
    assert picture.shape == visible.shape
    for row in range(0, SEQ_LEN, BLOCK_SIZE):
        for column in range(0, SEQ_LEN, BLOCK_SIZE):
            block = slice(row, row + BLOCK_SIZE), slice(column, column + BLOCK_SIZE)
            seen, kinds = visible[block], picture[block]
            if seen.all():
                assert (kinds == FULL).all(), (row, column)
            elif not seen.any():
                assert (kinds == SKIPPED).all(), (row, column)
            else:
                assert torch.equal(kinds, torch.where(seen, SEEN, HIDDEN)), (row, column)


def test_writes_the_picture(tmp_path):
    out = tmp_path / "masks.png"
    plot_masks.main(["--out", str(out)])
    assert 10_000 < out.stat().st_size < 150_000
