"""The lists of a block mask are made once, and are constants under torch.compile."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from kernels import flash_attention
from kernels.mask.block_mask import BlockSparseMask
from kernels.mask.patterns import butterfly
from kernels.testing import make_qkv


def test_lists_are_made_once() -> None:
    mask = BlockSparseMask(butterfly(4), 16)
    first = mask.lists(64, 64, causal=True)
    assert mask.lists(64, 64, causal=True) is first
    assert mask.lists(64, 64, causal=True, device="cpu") is first
    others = [
        mask.lists(64, 64),
        mask.lists(60, 64, causal=True),
        mask.lists(64, 60, causal=True),
        mask.lists(64, 64, causal=True, window_size=20),
        mask.lists(64, 64, causal=True, all_partial=True),
        mask.lists(64, 64, causal=True, device="meta"),
    ]
    assert len({id(lists) for lists in (first, *others)}) == 7
    assert all(x.device.type == "meta" for x in others[-1] if isinstance(x, Tensor))


def test_lists_made_in_inference_mode_are_usable_in_training() -> None:
    mask = BlockSparseMask(butterfly(4), 16)
    with torch.inference_mode():
        lists = mask.lists(64, 64)
    assert not any(x.is_inference() for x in lists if isinstance(x, Tensor))


def list_sums(x: Tensor, mask: BlockSparseMask, window_size: int | None = None) -> Tensor:
    lists = mask.lists(
        x.shape[0], x.shape[0], causal=True, window_size=window_size, device=x.device
    )
    weights = lists.rows[0, :, 0] * torch.arange(lists.rows.shape[1])
    return x.sum() + lists.row_blocks.sum() + lists.col_blocks.sum() * 100 + weights.sum()


@pytest.fixture
def compiled() -> Callable[..., Tensor]:
    torch.compiler.reset()
    return torch.compile(list_sums, backend="aot_eager", fullgraph=True)


def test_compiled_lists_match_the_mask(compiled: Callable[..., Tensor]) -> None:
    x = torch.ones(80)
    # Dynamo does not look at the tensors of a mask, but must still distinguish masks.
    masks = [BlockSparseMask(butterfly(5, n_factors=n), 16) for n in (3, 1, 3)]
    for mask in masks:
        assert compiled(x, mask) == list_sums(x, mask)
    assert list_sums(x, masks[0]) != list_sums(x, masks[1])
    # lists made while compiling are real tensors
    fresh = BlockSparseMask(butterfly(5, n_factors=2), 16)
    compiled(x, fresh)
    expected = BlockSparseMask(butterfly(5, n_factors=2), 16).lists(80, 80, causal=True)
    lists = fresh.lists(80, 80, causal=True, device="cpu")
    assert (lists.n_full, lists.n_partial) == (expected.n_full, expected.n_partial)
    assert all(torch.equal(a, b) for a, b in zip(lists[:4], expected[:4], strict=True))


def test_compiled_lists_follow_lengths_and_windows(compiled: Callable[..., Tensor]) -> None:
    mask = BlockSparseMask(butterfly(5), 16)
    # Dynamo makes sizes and numbers dynamic once they have changed.
    for seq_len, window_size in ((80, None), (79, 1), (78, 18), (77, 33), (77, None)):
        x = torch.ones(seq_len)
        assert compiled(x, mask, window_size) == list_sums(x, mask, window_size)


def test_layers_with_equal_masks_share_compiled_code() -> None:
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(list_sums, backend=counter, fullgraph=True)
    for _ in range(12):
        compiled(torch.ones(80), BlockSparseMask(butterfly(5), 16))
    assert counter.frame_count == 1


def test_dispatch_never_calls_bool_of_a_mask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def is_true(mask: BlockSparseMask) -> bool:
        raise AssertionError("PyTorch 2.11 cannot compile bool(mask)")

    monkeypatch.setattr(BlockSparseMask, "__bool__", is_true, raising=False)
    mask = BlockSparseMask(butterfly(2), 16)
    q, k, v = make_qkv(1, 32, 32, 1, 1, 16)
    assert flash_attention(q, k, v, mask=mask).shape == q.shape
    with pytest.raises(ValueError, match="it does not support mask"):
        flash_attention(q, k, v, mask=mask, impl="sdpa")
