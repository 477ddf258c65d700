"""The lists of a block mask against the mask itself, element by element."""

import copy
import math
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask, flex_attention
from torch.nn.functional import pad

from kernels.block_mask import BlockSparseMask
from kernels.mask_lists import MaskLists
from kernels.patterns import butterfly, global_blocks, sliding_window
from kernels.testing import make_qkv, relative_error


def elements(
    mask: BlockSparseMask, seq_q: int, seq_k: int, causal: bool, window_size: int | None
) -> Tensor:
    """(H_m, seq_q, seq_k) bool: the definition, one pair at a time."""
    size = mask.block_size
    i = torch.arange(seq_q).unsqueeze(1)
    j = torch.arange(seq_k)
    visible = mask.layout[:, i // size, j // size]
    p = i + seq_k - seq_q
    if causal:
        visible = visible & (j <= p)
    if window_size is not None:
        visible = visible & ((p - j).abs() < window_size)
    return visible


def expected_lists(visible: Tensor, size: int, all_partial: bool) -> tuple[list, list]:
    """rows and row_blocks of (H_m, seq_q, seq_k) visible pairs, by looking at every block."""
    entries, blocks = [], []
    for head in visible:
        entries.append([])
        for row, band in enumerate(head.split(size, dim=0)):
            tiles = band.split(size, dim=1)
            listed = [c for c, tile in enumerate(tiles) if tile.any()]
            full = [c for c in listed if tiles[c].all() and is_whole(tiles[c], size)]
            full = [] if all_partial else full
            partial = [c for c in listed if c not in full]
            firsts = [kind[0] if kind else 0 for kind in (full, partial)]
            last = [0, *full, *partial][-1]
            entries[-1].append([row, len(blocks), len(full), len(partial), *firsts, last])
            blocks += full + partial
        entries[-1].sort(key=lambda entry: (-(entry[2] + entry[3]), -entry[0]))
    return entries, blocks


def is_whole(tile: Tensor, size: int) -> bool:
    """No key of the block lies past the end. Queries may: nothing reads their output."""
    return tile.shape[1] == size


def assert_lists_match(
    mask: BlockSparseMask,
    seq_q: int,
    seq_k: int,
    causal: bool = False,
    window_size: int | None = None,
    all_partial: bool = False,
) -> None:
    lists = mask.lists(
        seq_q, seq_k, causal=causal, window_size=window_size, all_partial=all_partial
    )
    visible = elements(mask, seq_q, seq_k, causal, window_size)
    entries, blocks = expected_lists(visible, mask.block_size, all_partial)
    tensors = [x for x in lists if isinstance(x, Tensor)]
    assert all(x.dtype == torch.int32 and x.is_contiguous() for x in tensors)
    assert lists.rows.tolist() == entries
    assert lists.row_blocks.tolist() == blocks
    assert lists.rows.shape == (mask.n_head, mask.layout.shape[1], 7)
    assert lists.cols.shape == (mask.n_head, mask.layout.shape[2], 7)
    assert lists.n_full == lists.rows[..., 2].sum() == lists.cols[..., 2].sum()
    assert lists.n_partial == lists.rows[..., 3].sum() == lists.cols[..., 3].sum()
    assert type(lists.n_full) is type(lists.n_partial) is int
    assert lists.n_empty == sum(sum(entry[2:4]) == 0 for of_head in entries for entry in of_head)
    shown = BlockSparseMask(torch.ones_like(mask.layout), mask.block_size)
    assert lists.hides == bool(
        (elements(shown, seq_q, seq_k, causal, window_size) & ~visible).any()
    )

    # the columns, from the rows: the same blocks of the same kinds
    kinds = kinds_of(entries, blocks)
    col_entries, col_blocks = lists.cols.tolist(), lists.col_blocks.tolist()
    assert kinds_of(col_entries, col_blocks) == {(h, c, r): k for (h, r, c), k in kinds.items()}
    for of_head in col_entries:
        lengths_first = [(-(entry[2] + entry[3]), entry[0]) for entry in of_head]
        assert lengths_first == sorted(lengths_first)  # ties: the earlier column first
        for _, begin, full, partial, first_full, first_partial, last in of_head:
            split, end = begin + full, begin + full + partial
            assert col_blocks[begin:split] == sorted(col_blocks[begin:split])
            assert col_blocks[split:end] == sorted(col_blocks[split:end])
            assert first_full == (col_blocks[begin] if full else 0)
            assert first_partial == (col_blocks[split] if partial else 0)
            assert last == (col_blocks[end - 1] if full + partial else 0)
    # head by head, column by column, without a gap
    begins = [(h, *entry[:2]) for h, of_head in enumerate(col_entries) for entry in of_head]
    lengths = [sum(entry[2:4]) for of_head in col_entries for entry in sorted(of_head)]
    assert [b for *_, b in sorted(begins)] == [sum(lengths[:n]) for n in range(len(lengths))]
    assert sum(lengths) == len(col_blocks) == len(blocks)


def kinds_of(entries: list, blocks: list) -> dict[tuple[int, int, int], str]:
    """(head, number of the entry, listed block) -> its kind."""
    kinds = {}
    for head, of_head in enumerate(entries):
        for number, begin, full, partial, *_ in of_head:
            kinds |= {(head, number, b): "full" for b in blocks[begin : begin + full]}
            end = begin + full + partial
            kinds |= {(head, number, b): "partial" for b in blocks[begin + full : end]}
    return kinds


def random_mask(
    seq_q: int, seq_k: int, n_head: int = 1, size: int = 16, density: float = 0.5, seed: int = 0
) -> BlockSparseMask:
    shape = (n_head, math.ceil(seq_q / size), math.ceil(seq_k / size))
    generator = torch.Generator().manual_seed(seed)
    return BlockSparseMask(torch.rand(shape, generator=generator) < density, size)


def numbers(lists: MaskLists) -> list[list | int]:
    return [x.tolist() if isinstance(x, Tensor) else x for x in lists]


@pytest.mark.parametrize("window_size", [None, 1, 2, 16, 17, 40, 1000])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("seq_q", "seq_k"), [(1, 1), (64, 64), (65, 65), (79, 79), (33, 97), (97, 33), (1, 50), (50, 1)]
)
def test_lists(seq_q: int, seq_k: int, causal: bool, window_size: int | None) -> None:
    for density in (0.4, 1.0):
        mask = random_mask(seq_q, seq_k, n_head=2, density=density)
        assert_lists_match(mask, seq_q, seq_k, causal, window_size)


@settings(deadline=None, max_examples=120)
@given(
    seq_q=st.integers(1, 130),
    seq_k=st.integers(1, 130),
    n_head=st.integers(1, 3),
    size=st.sampled_from([16, 32]),
    density=st.sampled_from([0.0, 0.2, 0.7, 1.0]),
    seed=st.integers(0, 2**31),
    causal=st.booleans(),
    window_size=st.none() | st.integers(1, 140),
    all_partial=st.booleans(),
)
def test_lists_of_any_mask(
    seq_q: int,
    seq_k: int,
    n_head: int,
    size: int,
    density: float,
    seed: int,
    causal: bool,
    window_size: int | None,
    all_partial: bool,
) -> None:
    mask = random_mask(seq_q, seq_k, n_head, size, density, seed)
    assert_lists_match(mask, seq_q, seq_k, causal, window_size, all_partial)


def test_lists_written_out() -> None:
    layout = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 1, 1]], dtype=torch.bool)
    lists = BlockSparseMask(layout, 16).lists(40, 40, causal=True)
    # the diagonal cuts blocks (0, 0), (1, 1) and (2, 2)
    assert lists.row_blocks.tolist() == [0, 0, 1, 1, 2]
    assert lists.rows.tolist() == [
        [[2, 3, 1, 1, 1, 2, 2], [1, 1, 1, 1, 0, 1, 1], [0, 0, 0, 1, 0, 0, 0]]
    ]
    assert lists.col_blocks.tolist() == [1, 0, 2, 1, 2]
    assert lists.cols.tolist() == [
        [[0, 0, 1, 1, 1, 0, 0], [1, 2, 1, 1, 2, 1, 1], [2, 4, 0, 1, 0, 2, 2]]
    ]
    assert (lists.n_full, lists.n_partial) == (2, 3)


def test_empty_rows_columns_and_layouts() -> None:
    layout = torch.ones(3, 4, dtype=torch.bool)
    layout[1] = False
    layout[:, 2] = False
    mask = BlockSparseMask(layout, 16)
    assert_lists_match(mask, 48, 64)
    lists = mask.lists(48, 64)
    assert lists.rows[0, -1].tolist() == [1, 3, 0, 0, 0, 0, 0]
    assert lists.cols[0, -1].tolist() == [2, 4, 0, 0, 0, 0, 0]

    nothing = BlockSparseMask(torch.zeros(2, 3, 4, dtype=torch.bool), 16)
    assert_lists_match(nothing, 48, 64)
    assert nothing.lists(48, 64).row_blocks.numel() == 0
    # causal with more queries than keys: the first queries see nothing
    assert_lists_match(BlockSparseMask(layout, 16), 48, 49, causal=True)
    blind = BlockSparseMask(torch.ones(8, 1, dtype=torch.bool), 16)
    assert blind.lists(128, 16, causal=True).row_blocks.numel() == 1


def test_an_all_true_mask_lists_what_dense_attention_visits() -> None:
    n = 8
    mask = BlockSparseMask(torch.ones(n, n, dtype=torch.bool), 128)
    dense, causal = mask.lists(1024, 1024), mask.lists(1024, 1024, causal=True)
    assert dense.row_blocks.numel() == n * n
    assert (dense.rows[..., 2] == n).all() and not dense.rows[..., 3].any()
    assert causal.row_blocks.numel() == n * (n + 1) // 2
    assert (causal.rows[..., 3] == 1).all()
    # an odd length: only the last key block is cut, and the last rows of queries need no mask
    cut = mask.lists(1000, 1000)
    assert (cut.rows[..., 2] == n - 1).all() and (cut.rows[..., 3] == 1).all()


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_large_blocks_can_be_listed_in_smaller_ones(causal: bool) -> None:
    mask = random_mask(230, 210, n_head=2, size=64)
    lists = mask.lists(230, 210, causal=causal, block_size=16)
    layout = mask.layout.repeat_interleave(4, 1).repeat_interleave(4, 2)[:, :15, :14]
    smaller = BlockSparseMask(layout, 16)
    assert_lists_match(smaller, 230, 210, causal)
    assert numbers(lists) == numbers(smaller.lists(230, 210, causal=causal))
    assert (lists.block_size, mask.lists(230, 210, causal=causal).block_size) == (16, 64)
    assert mask.lists(230, 210, causal=causal, block_size=16) is lists
    with pytest.raises(ValueError, match="seq_q=300 needs"):
        mask.lists(300, 210, block_size=16)


def test_columns_in_the_order_of_the_layout() -> None:
    mask = random_mask(140, 140, n_head=3)
    by_length = mask.lists(140, 140, causal=True)
    by_number = mask.lists(140, 140, causal=True, longest_column_first=False)
    assert by_number.cols[..., 0].tolist() == [list(range(9))] * 3
    assert [sorted(head) for head in by_length.cols.tolist()] == by_number.cols.tolist()
    for name in ("rows", "row_blocks", "col_blocks"):
        assert torch.equal(getattr(by_number, name), getattr(by_length, name))


def test_all_partial_lists_the_same_blocks() -> None:
    mask = BlockSparseMask(butterfly(9) | sliding_window(9, 2), 16)
    some = mask.lists(140, 140, causal=True)
    every = mask.lists(140, 140, causal=True, all_partial=True)
    assert not every.rows[..., 2].any() and not every.cols[..., 2].any()
    assert torch.equal(every.rows[..., 3], some.rows[..., 2] + some.rows[..., 3])
    assert (every.n_full, every.n_partial) == (0, some.n_full + some.n_partial)
    # of these rows the diagonal block, their last, is the only partial one: the order is the same
    assert torch.equal(every.row_blocks, some.row_blocks)


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
        seen = torch.ones(seq_q, seq_k, dtype=torch.bool)
        seen = seen.tril(seq_k - seq_q) if causal else seen
        kept = (mask.to_dense(seq_q, seq_k) & seen).sum().item()
        expected = kept / (3 * seen.sum().item())
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
    # flex has one head index per query head, also where the mask has one layout for all
    n_query_head = 3
    seen = create_mask(flex.mask_mod, 2, n_query_head, seq_q, seq_k, device="cpu")
    assert torch.equal(seen, visible.expand(2, n_query_head, seq_q, seq_k))

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


def test_a_mask_is_a_value() -> None:
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
    # models that hold one are copied and saved
    for copied in (copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
        assert copied.digest == mask.digest
        assert numbers(copied.lists(64, 64)) == numbers(mask.lists(64, 64))


def test_a_strided_layout() -> None:
    layout = torch.rand(6, 4, generator=torch.Generator().manual_seed(0)) < 0.5
    mask = BlockSparseMask(layout.T, 16)
    assert_lists_match(mask, 64, 96)
    assert mask.digest == BlockSparseMask(layout.T.contiguous(), 16).digest


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


@pytest.mark.parametrize("window_size", [0, -3])
def test_windows_without_the_query_itself_are_refused(window_size: int) -> None:
    mask = BlockSparseMask(butterfly(4), 16)
    for method in (mask.lists, mask.to_flex):
        with pytest.raises(ValueError, match=f"window_size must be at least 1.*got {window_size}"):
            method(64, 64, window_size=window_size)


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
            seen = visible[head, 64 * row : 64 * row + 64].split(64, dim=1)
            numbers = [x & 0xFFFF for x in listed]
            assert sorted(numbers) == [i for i, x in enumerate(seen) if x.any()]
            for i, (number, entry) in enumerate(zip(numbers, listed, strict=True)):
                block = seen[number]
                parts = block.unflatten(0, (4, 16)).unflatten(2, (4, 16)).transpose(1, 2)
                there = [(entry >> 16 >> bit) & 1 for bit in range(16)]
                assert there == blocks_with(parts.flatten(2).any(-1), size)
                # what is called full needs no mask, as queries past the end ask for none
                assert i >= n_full or block[: 230 - 64 * row].all()


def blocks_with(parts: Tensor, size: int) -> list[int]:
    """Parts (4, 4) of 16, and those that lie in one block of the mask with them."""
    n = size // 16
    blocks = parts.unflatten(0, (-1, n)).unflatten(2, (-1, n)).transpose(1, 2).flatten(2).any(-1)
    return blocks.repeat_interleave(n, 0).repeat_interleave(n, 1).flatten().int().tolist()


def test_packed_fill() -> None:
    eye = torch.eye(8, dtype=torch.bool)
    assert [BlockSparseMask(eye, size).packed_fill for size in (16, 32, 64, 128)] == [4, 2, 1, 1]
    assert BlockSparseMask(eye & ~eye, 16).packed_fill == 16
    # at the end of a layout a block of 64 holds fewer
    assert BlockSparseMask(eye[:5, :5] | True, 16).packed_fill == 16


def test_lists_in_blocks_of_no_such_size_are_refused() -> None:
    for size, asked in ((32, 128), (16, 32), (64, 60)):
        with pytest.raises(
            ValueError, match=f"block_size={asked} of lists must be .* {size}, that"
        ):
            BlockSparseMask(torch.eye(4, dtype=torch.bool), size).lists(
                4 * size, 4 * size, block_size=asked
            )
