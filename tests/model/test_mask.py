"""Mask of a model: layout, one object per length, and errors."""

from typing import Any

import pytest
import torch

from model.config import ModelConfig
from model.flops import forward_flops_per_token
from model.mask_config import MaskConfig


def test_dense_needs_no_mask() -> None:
    assert MaskConfig().build(1000) is None
    assert MaskConfig().density(1000, causal=True) == 1.0


def test_layout_is_butterfly_window_and_global_blocks() -> None:
    config = MaskConfig(pattern="butterfly", block_size=16, window_blocks=3, global_blocks=1)
    mask = config.build(16 * 11 + 5)
    assert mask is not None and mask.layout.shape == (1, 12, 12)
    for i in range(12):
        for j in range(12):
            butterfly = i == j or (i ^ j).bit_count() == 1
            expected = butterfly or abs(i - j) < 3 or min(i, j) < 1
            assert mask.layout[0, i, j] == expected
    assert config.build(16 * 11 + 5) is mask


def test_the_last_of_128_blocks_sees_the_most() -> None:
    mask = MaskConfig(pattern="butterfly").build(16_384)  # as stated in docs/evaluation.md
    assert mask is not None and mask.layout.shape == (1, 128, 128)
    visible = mask.layout[0].tril().sum(dim=1)
    assert visible.float().mean().item() == pytest.approx(5.9, abs=0.05)
    assert visible[-1] == visible.max() == 9


def test_the_mask_of_the_last_query_matches_the_whole_mask() -> None:
    config = MaskConfig(pattern="butterfly", block_size=16)
    for seq_len in (1, 16, 17, 100, 128):
        whole, last = config.build(seq_len), config.build(seq_len, last_query_only=True)
        assert whole is not None and last is not None
        expected = whole.to_dense(seq_len, seq_len)[:, -1:]
        assert torch.equal(last.to_dense(1, seq_len), expected)


def test_window_of_two_connects_every_block_to_its_past() -> None:
    """Paths through layers, under a causal mask, with and without the window."""

    def reached(window_blocks: int) -> torch.Tensor:
        config = MaskConfig(
            pattern="butterfly", block_size=16, window_blocks=window_blocks, global_blocks=0
        )
        mask = config.build(16 * 16)
        assert mask is not None
        step = mask.layout[0].tril().double()
        return torch.linalg.matrix_power(step, 12) > 0  # the number of layers of GPT-2 small

    past = torch.ones(16, 16).tril().bool()
    assert not torch.equal(reached(1), past)
    assert torch.equal(reached(2), past)


def test_flops_count_only_unmasked_pairs() -> None:
    mask = MaskConfig(pattern="butterfly")
    dense, sparse = ModelConfig(context_length=4096), ModelConfig(context_length=4096, mask=mask)
    for causal in (True, False):
        attention = 2 * (1 if causal else 2) * 12 * 768 * 4096
        saved = forward_flops_per_token(dense, causal=causal) - forward_flops_per_token(
            sparse, causal=causal
        )
        assert saved == pytest.approx(attention * (1 - mask.density(4096, causal=causal)))
    assert 0.2 < mask.density(4096, causal=True) < 0.35


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pattern": "diagonal"}, "model.mask.pattern='diagonal' must be one of dense, butterfly"),
        ({"block_size": 100}, "model.mask.block_size=100 must be one of 16, 32, 64, 128, 256"),
        ({"window_blocks": 0}, "model.mask.window_blocks=0 must be at least 1"),
        ({"global_blocks": -1}, "model.mask.global_blocks=-1 must be at least 0"),
    ],
)
def test_invalid_fields_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MaskConfig(**fields)


def test_sdpa_does_not_support_masks() -> None:
    with pytest.raises(ValueError, match="=butterfly is not supported with model.attention=sdpa"):
        ModelConfig(mask=MaskConfig(pattern="butterfly"), attention="sdpa")
