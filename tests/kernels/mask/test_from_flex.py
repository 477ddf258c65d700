"""`BlockSparseMask.from_flex`: options that hide the same pairs as a BlockMask, or a refusal."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import (
    BlockMask,
    and_masks,
    create_block_mask,
    create_mask,
    flex_attention,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kernels import BlockSparseMask, flash_attention
from kernels.mask import from_flex
from kernels.mask.block_mask import MaskOptions
from kernels.mask.patterns import butterfly, global_blocks, sliding_window
from kernels.testing import make_qkv, relative_error
from tests.kernels.masks import random_mask

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
DOCUMENTS = torch.tensor([[5, 60, 1, 84], [70, 33, 40, 7]])


def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


def document_mask(lengths: Tensor) -> MaskMod:
    """Pairs in the same document, from the lengths (B, n) of the documents of each sequence."""
    n = torch.arange(lengths.shape[1], device=lengths.device)
    documents = torch.stack([n.repeat_interleave(row) for row in lengths])
    return lambda b, h, q, kv: documents[b, q] == documents[b, kv]


def window(size: int) -> MaskMod:
    return lambda b, h, q, kv: (q - kv).abs() < size


def shown_by(
    options: MaskOptions, batch: int, n_head: int, seq_q: int, seq_k: int, impl: str = "reference"
) -> Tensor:
    """(B, H, T_q, T_k) bool: the pairs that flash_attention gives a weight."""
    q, k = torch.zeros(batch, seq_q, n_head, seq_k), torch.zeros(batch, seq_k, n_head, seq_k)
    one_hot = torch.eye(seq_k)[None, :, None].expand(batch, -1, n_head, -1)
    return (flash_attention(q, k, one_hot, impl=impl, **options) > 0).transpose(1, 2)


def flex_mask(mask_mod: MaskMod, *, batch: int = 1, n_head: int = 1, length: int = 150,
              block_size: int | tuple[int, int] = 16) -> BlockMask:  # fmt: skip
    sizes = batch, n_head, length, length
    return create_block_mask(mask_mod, *sizes, device="cpu", BLOCK_SIZE=block_size)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("mask_mod", "batch", "names"),
    [
        (lambda b, h, q, kv: q >= 0, 1, ""),
        (causal, 1, "causal"),
        (window(40), 1, "window_size"),
        (and_masks(causal, window(40)), 1, "causal window_size"),
        (and_masks(causal, document_mask(DOCUMENTS)), 2, "causal doc_start"),
        (and_masks(causal, document_mask(DOCUMENTS), window(9)), 2, "causal doc_start"),
        (lambda b, h, q, kv: kv < 50 + 40 * b, 2, "kv_lengths"),
        (lambda b, h, q, kv: (q // 32 - kv // 32).abs() != 1, 1, "mask"),
        (lambda b, h, q, kv: (q >= kv) & (q // 32 - kv // 32 != 1 + h), 1, "causal mask"),
    ],
)  # fmt: skip
def test_result_equals_flex_attention(mask_mod: MaskMod, batch: int, names: str) -> None:
    block_mask = flex_mask(mask_mod, batch=batch, n_head=2, block_size=32)
    options = BlockSparseMask.from_flex(block_mask)
    assert {*options} == {*names.split()}
    q, k, v = make_qkv(batch, 150, 150, 2, 2, 16, dtype=torch.float64)
    expected = flex_attention(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=block_mask)
    out = flash_attention(q, k, v, **options)
    assert relative_error(out, expected.transpose(1, 2)) < 1e-12


def test_values_of_the_options() -> None:
    mask_mod = and_masks(causal, document_mask(DOCUMENTS))
    options = BlockSparseMask.from_flex(flex_mask(mask_mod, batch=2))
    starts = torch.cat([torch.zeros(2, 1, dtype=torch.int64), DOCUMENTS.cumsum(1)[:, :-1]], dim=1)
    expected = [s.repeat_interleave(n) for s, n in zip(starts, DOCUMENTS, strict=True)]
    assert options["causal"] is True
    assert torch.equal(options["doc_start"], torch.stack(expected).int())
    options = BlockSparseMask.from_flex(flex_mask(and_masks(causal, window(40))))
    assert options == {"causal": True, "window_size": 40}
    options = BlockSparseMask.from_flex(flex_mask(lambda b, h, q, kv: kv < 50 + 40 * b, batch=2))
    assert options["kv_lengths"].tolist() == [50, 90]


@pytest.mark.parametrize("n_head", [1, 3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seq_q", "seq_k"), [(64, 64), (79, 79), (33, 97), (97, 33)])
def test_round_trip_of_a_mask(n_head: int, causal: bool, seq_q: int, seq_k: int) -> None:
    mask = random_mask(seq_q, seq_k, n_head)
    options = BlockSparseMask.from_flex(mask.to_flex(seq_q, seq_k, causal=causal, window_size=40))
    assert options.get("causal", False) == causal
    expected = shown_by(
        {"mask": mask, "causal": causal, "window_size": 40}, 1, n_head, seq_q, seq_k
    )
    assert torch.equal(shown_by(options, 1, n_head, seq_q, seq_k), expected)


def test_butterfly_keeps_its_layout() -> None:
    mask = BlockSparseMask(torch.stack([butterfly(8), sliding_window(8, 2)]), 16)
    options = BlockSparseMask.from_flex(mask.to_flex(128, 128))
    assert {*options} == {"mask"}
    assert torch.equal(options["mask"].layout, mask.layout)
    options = BlockSparseMask.from_flex(mask.to_flex(128, 128, causal=True))
    assert {*options} == {"mask", "causal"}
    assert torch.equal(options["mask"].layout, mask.layout.tril())


def test_kernels_take_the_options() -> None:
    """Documents that differ within a batch, under one layout."""
    layout = butterfly(5, global_blocks=1)

    def in_layout(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return layout[q // 16, kv // 16]

    lengths = torch.tensor([[40, 30], [9, 61]])
    mask_mod = and_masks(causal, in_layout, document_mask(lengths))
    options = BlockSparseMask.from_flex(flex_mask(mask_mod, batch=2, length=70))
    assert {*options} == {"mask", "causal", "doc_start"}
    expected = create_mask(mask_mod, 2, 1, 70, 70, device="cpu")
    assert torch.equal(shown_by(options, 2, 1, 70, 70, impl="triton"), expected)


@pytest.mark.gpu
def test_result_equals_compiled_flex_attention() -> None:
    layout = torch.stack([butterfly(8), sliding_window(8, 2)]).cuda()
    lengths = torch.tensor([[300, 1, 649], [640, 200, 110]]).cuda()

    def in_layout(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return layout[h, q // 128, kv // 128]

    mask_mod = and_masks(causal, in_layout, document_mask(lengths))
    block_mask = create_block_mask(mask_mod, 2, 2, 950, 950, device="cuda")
    options = BlockSparseMask.from_flex(block_mask)
    assert {*options} == {"mask", "causal", "doc_start"}
    q, k, v = make_qkv(2, 950, 950, 2, 2, 64, dtype=torch.float16, device="cuda")
    heads_first = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    expected = torch.compile(flex_attention)(*heads_first, block_mask=block_mask)
    out = flash_attention(q, k, v, **options)
    assert relative_error(out, expected.transpose(1, 2)) < 2e-3
    other = create_block_mask(lambda b, h, q, kv: q > kv + 2, 1, 1, 950, 950, device="cuda")
    with pytest.raises(ValueError, match="It hides key 1 from query 3 "):
        BlockSparseMask.from_flex(other)


@pytest.mark.parametrize(("block_size", "expected"), [((64, 32), 32), (512, 256), ((48, 80), 16)])
def test_other_block_sizes_are_divided(block_size: int | tuple[int, int], expected: int) -> None:
    def blocks(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & (q // 256 * 256 <= kv + 256 * h)

    block_mask = flex_mask(blocks, n_head=2, length=300, block_size=block_size)
    mask = BlockSparseMask.from_flex(block_mask)["mask"]
    assert mask.block_size == expected
    layout = mask.to_dense(300, 300) & torch.ones(300, 300, dtype=torch.bool).tril()
    assert torch.equal(layout, create_mask(blocks, 1, 2, 300, 300, device="cpu")[0])


def test_listed_full_blocks_are_whole() -> None:
    """Compiled flex_attention does not call mask_mod in them."""
    ones, zeros = torch.ones(1, 1, 2, dtype=torch.int32), torch.zeros(1, 1, 2, dtype=torch.int32)
    first, second = (torch.full((1, 1, 2, 2), n, dtype=torch.int32) for n in (0, 1))
    never = torch.zeros((), dtype=torch.bool)
    block_mask = BlockMask.from_kv_blocks(
        ones, second, ones, first, BLOCK_SIZE=16, mask_mod=lambda b, h, q, kv: (q < 0) | never
    )
    options = BlockSparseMask.from_flex(block_mask)
    assert torch.equal(shown_by(options, 1, 1, 32, 32)[..., :16], torch.ones(1, 1, 32, 16) > 0)
    assert not shown_by(options, 1, 1, 32, 32)[..., 16:].any()
    nothing = BlockMask.from_kv_blocks(zeros, first, BLOCK_SIZE=16)
    assert BlockSparseMask.from_flex(nothing)["mask"].is_empty


@st.composite
def conditions(draw: st.DrawFn) -> tuple[int, int, int, int, Tensor]:
    """Block size, and the visible pairs (B, H, T_q, T_k) under random options."""
    batch, n_head = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    size = draw(st.sampled_from([16, 32]))
    seq_k = draw(st.integers(1, 100))
    seq_q = draw(st.one_of(st.just(seq_k), st.integers(1, 100)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    mask = random_mask(seq_q, seq_k, n_head, size, draw(st.sampled_from([0.3, 0.8, 1.0])))
    visible = mask.to_dense(seq_q, seq_k).expand(batch, -1, -1, -1)
    p, j = torch.arange(seq_q).unsqueeze(1) + seq_k - seq_q, torch.arange(seq_k)
    if draw(st.booleans()):
        visible = visible & (j <= p)
    if draw(st.booleans()):
        visible = visible & ((p - j).abs() < draw(st.integers(1, 100)))
    if draw(st.booleans()):
        starts = torch.randint(seq_k + 1, (batch, 1, seq_q, 1), generator=generator)
        visible = visible & (j >= starts.sort(2).values)
    if draw(st.booleans()):
        visible = visible & (j < torch.randint(seq_k + 1, (batch, 1, 1, 1), generator=generator))
    return size, visible


def mask_of(visible: Tensor, size: int) -> BlockMask:
    shape = visible.shape
    return create_block_mask(
        lambda b, h, q, kv: visible[b, h, q, kv], *shape, device="cpu", BLOCK_SIZE=size
    )


@given(conditions())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_random_options_are_recovered(case: tuple[int, Tensor]) -> None:
    size, visible = case
    options = BlockSparseMask.from_flex(mask_of(visible, size))
    assert torch.equal(shown_by(options, *visible.shape), visible)


def test_one_more_hidden_pair_is_refused_or_exact() -> None:
    generator = torch.Generator().manual_seed(0)
    refused = 0
    for _ in range(40):
        visible = torch.ones(1, 1, 50, 50, dtype=torch.bool).tril()
        i, j = torch.randint(50, (2,), generator=generator).sort(descending=True).values.tolist()
        visible[0, 0, i, j] = False
        try:
            options = BlockSparseMask.from_flex(mask_of(visible, 16))
        except ValueError as error:
            refused += 1
            assert f"hides key {j} from query {i} (" in str(error)
        else:
            assert torch.equal(shown_by(options, *visible.shape), visible)
            assert j == 0  # a later start of its document hides the first key only
    assert refused > 30


@pytest.mark.parametrize(
    ("mask_mod", "message"),
    [
        (
            lambda b, h, q, kv: (q >= kv) | (kv < 20),
            r"key 20 from query 0 \(sequence 0, head 0, key block 1\), but causal=True would also "
            "hide key 19 from query 0 of sequence 0, which block_mask shows. Try flex_attention",
        ),
        (lambda b, h, q, kv: (q + kv) % 2 == 0, "key 1 from query 0 .* hide key 148 from query 0"),
        (lambda b, h, q, kv: q > kv + 2, "key 1 from query 3 .* doc_start would also hide key 0"),
        (document_mask(DOCUMENTS), "key 5 from query 0 .* causal=True would also hide key 4"),
        (
            lambda b, h, q, kv: (q >= kv) & ((kv < 4) | (q - kv < 40)),
            "key 4 from query 44 .* doc_start would also hide key 0 from that query",
        ),
        (
            lambda b, h, q, kv: (q >= kv) & ((b == 0) | (q // 16 - kv // 16 != 1)),
            r"key 16 from query 32 \(sequence 1, head 0, key block 1\), but doc_start would also",
        ),
    ],
)  # fmt: skip
def test_other_masks_are_refused_with_a_reason(mask_mod: MaskMod, message: str) -> None:
    with pytest.raises(ValueError, match=f"must be cut by causal.* It hides {message}"):
        BlockSparseMask.from_flex(flex_mask(mask_mod, batch=2))


def test_causal_masks_aligned_at_the_top_left_are_refused() -> None:
    block_mask = create_block_mask(causal, 1, 1, 40, 100, device="cpu", BLOCK_SIZE=16)
    message = "with T_q=40 and T_k=100, query 0 is at key position 60"
    with pytest.raises(ValueError, match=f"Masks align at the bottom right: {message}"):
        BlockSparseMask.from_flex(block_mask)
    block_mask = create_block_mask(
        lambda b, h, q, kv: q + 60 >= kv, 1, 1, 40, 100, device="cpu", BLOCK_SIZE=16
    )
    assert BlockSparseMask.from_flex(block_mask) == {"causal": True}


@pytest.mark.parametrize(
    ("block_mask", "message"),
    [
        (butterfly(8), "block_mask must be a BlockMask .* got Tensor. Try create_block_mask"),
        (flex_mask(causal, block_size=24), r"BLOCK_SIZE=\(24, 24\) must be multiples of one of"),
        (
            flex_mask(causal)[:, :, :2],
            r"kv_indices=\(1, 1, 2, 10\) must be \(B, H, 10, n\) .* without taking a slice",
        ),
    ],
)
def test_malformed_masks_are_refused(block_mask: BlockMask, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BlockSparseMask.from_flex(block_mask)


class LargestTensor(TorchDispatchMode):
    """Record the largest number of elements of a tensor that an operator returns."""

    numel = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.numel = max([self.numel, *(x.numel() for x in tensors)])
        return out


def test_no_tensor_holds_all_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    length, limit = 2048, 2**14
    mask = BlockSparseMask(sliding_window(64, 9) | global_blocks(64, 1), 32)
    block_mask = mask.to_flex(length, length, causal=True)
    expected = BlockSparseMask.from_flex(block_mask)
    monkeypatch.setattr(from_flex, "_MAX_PAIRS", limit)
    with LargestTensor() as largest:
        options = BlockSparseMask.from_flex(block_mask)
    assert largest.numel <= 2 * limit
    assert options["mask"].digest == expected["mask"].digest
