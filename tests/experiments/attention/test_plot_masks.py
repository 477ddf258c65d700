"""The picture of masks: the colour of each block against the mask, element by element."""

import matplotlib.image
import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb

from experiments.attention import plot_masks
from experiments.attention.plot_masks import (
    BLOCK_SIZE,
    FULL,
    HIDDEN,
    N_BLOCKS,
    SEEN,
    SEQ_LEN,
    SKIPPED,
)
from kernels.block_mask import BlockSparseMask
from kernels.patterns import butterfly
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


def test_kinds_of_known_masks():
    i, j = torch.arange(N_BLOCKS).unsqueeze(1), torch.arange(N_BLOCKS)
    causal = torch.where(i > j, FULL, torch.where(i == j, SEEN, SKIPPED))
    assert torch.equal(plot_masks.block_kinds(MASKS["causal"]), causal)
    partners = butterfly(N_BLOCKS)
    assert torch.equal(plot_masks.block_kinds(MASKS["butterfly"]), torch.where(partners, FULL, 0))
    assert torch.equal(
        plot_masks.block_kinds(MASKS["butterfly, causal"]), torch.where(partners, causal, SKIPPED)
    )
    # the lists of an all-true layout say the same as the definition
    everything = BlockSparseMask(torch.ones(N_BLOCKS, N_BLOCKS, dtype=torch.bool), BLOCK_SIZE)
    listed = plot_masks.block_kinds({"causal": True, "mask": everything})
    assert torch.equal(listed, causal)


def test_every_kind_is_in_the_picture(tmp_path, capsys):
    out = tmp_path / "masks.png"
    plot_masks.main(["--out", str(out)])
    assert capsys.readouterr().out == f"drew {out}\n"
    assert out.stat().st_size < 150_000
    pixels = matplotlib.image.imread(out)[..., :3]
    for kind, colour in enumerate(plot_masks.COLOURS):
        share = np.isclose(pixels, to_rgb(colour), atol=0.01).all(-1).mean()
        drawn = torch.stack([plot_masks.picture(x) == kind for x in MASKS.values()])
        # the rest of the picture is titles, margins and the lines between blocks
        assert 0.5 < share / drawn.double().mean().item() < 1, colour
