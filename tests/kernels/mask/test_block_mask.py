"""Block masks without their lists: equality, density, and masks of other libraries."""

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask, flex_attention

from kernels.mask.block_mask import BlockSparseMask
from kernels.mask.patterns import butterfly, global_blocks, sliding_window
from kernels.testing import make_qkv, relative_error
from tests.kernels.masks import elements, kinds_of, numbers, random_mask


@pytest.mark.parametrize("n_head", [1, 3])
def test_to_dense(n_head: int) -> None:
    mask = random_mask(40, 70, n_head)
    dense = mask.to_dense(40, 70)
    assert dense.shape == (n_head, 40, 70)
    for h, i, j in torch.cartesian_prod(*map(torch.arange, dense.shape)).tolist():
        assert dense[h, i, j] == mask.layout[h, i // 16, j // 16]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("seq_q", "seq_k"), [(1, 1), (64, 64), (79, 79), (33, 97), (97, 33), (1, 50), (50, 1)]
)
def test_density(seq_q: int, seq_k: int, causal: bool) -> None:
    for density in (0.0, 0.3, 1.0):
        mask = random_mask(seq_q, seq_k, n_head=3, density=density)
        allowed = torch.ones(seq_q, seq_k, dtype=torch.bool)
        allowed = allowed.tril(seq_k - seq_q) if causal else allowed
        kept = (mask.to_dense(seq_q, seq_k) & allowed).sum().item()
        expected = kept / (3 * allowed.sum().item())
        assert mask.density(seq_q, seq_k, causal=causal) == expected


@pytest.mark.parametrize("window_size", [None, 20])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n_head", [1, 3])
@pytest.mark.parametrize(("seq_q", "seq_k"), [(64, 64), (79, 79), (33, 97), (97, 33)])
def test_to_flex_is_the_same_mask(
    seq_q: int, seq_k: int, n_head: int, causal: bool, window_size: int | None
) -> None:
    mask = random_mask(seq_q, seq_k, n_head)
    flex = mask.to_flex(seq_q, seq_k, causal=causal, window_size=window_size)
    visible = elements(mask, seq_q, seq_k, causal, window_size)
    assert flex.shape == (1, n_head, seq_q, seq_k)
    # flex has one head index per query head, even if the mask has one layout for all heads
    n_query_head = 3
    flex_visible = create_mask(flex.mask_mod, 2, n_query_head, seq_q, seq_k, device="cpu")
    assert torch.equal(flex_visible, visible.expand(2, n_query_head, seq_q, seq_k))

    lists = mask.lists(seq_q, seq_k, causal=causal, window_size=window_size)
    kinds = kinds_of(lists.rows.tolist(), lists.row_blocks.tolist())
    assert {tuple(x) for x in flex.to_dense()[0].nonzero().tolist()} == set(kinds)
    assert flex.full_kv_num_blocks is not None and flex.full_kv_indices is not None
    rows = lists.rows.gather(1, lists.rows[..., :1].argsort(1).expand(-1, -1, 6))
    assert torch.equal(flex.full_kv_num_blocks[0], rows[..., 2])
    assert torch.equal(flex.kv_num_blocks[0], rows[..., 3])
    full = {key for key, kind in kinds.items() if kind == "full"}
    for h, r, c in full:
        assert c in flex.full_kv_indices[0, h, r, : flex.full_kv_num_blocks[0, h, r]]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("causal", [False, True])
def test_flex_attention_is_sdpa_with_the_dense_mask(causal: bool) -> None:
    seq_len = 70
    layout = torch.stack([butterfly(5), sliding_window(5, 1) | global_blocks(5, 1)])
    mask = BlockSparseMask(layout, 16)
    q, k, v = (
        x.transpose(1, 2) for x in make_qkv(2, seq_len, seq_len, 2, 2, 16, dtype=torch.float64)
    )
    visible = elements(mask, seq_len, seq_len, causal, 40)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
    flex = mask.to_flex(seq_len, seq_len, causal=causal, window_size=40)
    assert relative_error(flex_attention(q, k, v, block_mask=flex), expected) < 1e-12


def test_masks_are_compared_and_copied_by_value() -> None:
    layout = butterfly(4)
    mask = BlockSparseMask(layout, 16)
    layout[:] = True
    assert torch.equal(mask.layout, butterfly(4).unsqueeze(0))
    assert mask.digest == BlockSparseMask(butterfly(4).expand(1, 4, 4), 16).digest
    different = (
        BlockSparseMask(layout, 16),
        BlockSparseMask(butterfly(4), 32),
        BlockSparseMask(butterfly(4).reshape(2, 8), 16),
        BlockSparseMask(butterfly(4).expand(2, 4, 4), 16),
    )
    assert len({mask.digest, *(x.digest for x in different)}) == 5
    # models with a mask can be copied and saved after calls, although cached launches cannot
    mask.decisions["a call"] = threading.local()
    for copied in (copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
        assert copied.digest == mask.digest
        assert numbers(copied.lists(64, 64)) == numbers(mask.lists(64, 64))


def test_repr() -> None:
    shared = BlockSparseMask(butterfly(8), 128)
    assert repr(shared) == "BlockSparseMask(8 x 8 blocks of 128 for all heads, density 0.500)"
    per_head = BlockSparseMask(torch.ones(4, 2, 3, dtype=torch.bool), 64)
    expected = "BlockSparseMask(2 x 3 blocks of 64 for each of 4 heads, density 1.000)"
    assert repr(per_head) == expected


@pytest.mark.parametrize(
    "layout",
    [
        torch.ones(4, 4),
        torch.ones(4, dtype=torch.bool),
        torch.ones(1, 2, 4, 4, dtype=torch.bool),
        torch.ones(0, 4, dtype=torch.bool),
    ],
)
def test_malformed_layouts_are_refused(layout: Tensor) -> None:
    with pytest.raises(ValueError, match=r"layout must be a bool tensor.*got torch\..*shape \("):
        BlockSparseMask(layout, 16)


@pytest.mark.parametrize("block_size", [0, 8, 48, 512])
def test_other_block_sizes_are_refused(block_size: int) -> None:
    with pytest.raises(ValueError, match=rf"block_size must be one of .*, got {block_size}"):
        BlockSparseMask(butterfly(4), block_size)


@pytest.mark.parametrize("method", ["lists", "to_dense", "density", "to_flex"])
def test_lengths_that_do_not_fit_are_refused(method: str) -> None:
    call: Any = getattr(BlockSparseMask(torch.ones(4, 6, dtype=torch.bool), 16), method)
    for seq_q, seq_k in ((64, 96), (49, 81)):
        call(seq_q, seq_k)
    needs = r"seq_q=65 needs ceil\(65 / 16\) = 5 blocks.*n_q_blocks=4, for seq_q from 49 to 64"
    with pytest.raises(ValueError, match=needs + r".*layout with n_q_blocks=5"):
        call(65, 96)
    with pytest.raises(ValueError, match=r"seq_q=48 .* = 3 blocks"):
        call(48, 96)
    with pytest.raises(ValueError, match=r"seq_k=80 .* = 5 blocks.*n_k_blocks=6"):
        call(64, 80)
    with pytest.raises(ValueError, match=r"seq_k=97 .* = 7 blocks.*n_k_blocks=6"):
        call(64, 97)
    with pytest.raises(ValueError, match=r"seq_q=0 .* = 0 blocks"):
        call(0, 96)
