"""The lists of a block mask against the mask itself, element by element."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.mask.block_mask import BlockSparseMask
from kernels.mask.patterns import butterfly, sliding_window
from tests.kernels.masks import elements, kinds_of, numbers, random_mask


def expected_lists(visible: Tensor, size: int, all_partial: bool) -> tuple[list, list]:
    """rows and row_blocks of (H_m, seq_q, seq_k) visible pairs, by looking at every block."""
    entries, blocks = [], []
    for head in visible:
        entries.append([])
        for row, band in enumerate(head.split(size, dim=0)):
            tiles = band.split(size, dim=1)
            listed = [c for c, tile in enumerate(tiles) if tile.any()]
            full = [c for c in listed if tiles[c].all() and is_full(tiles[c], size)]
            full = [] if all_partial else full
            partial = [c for c in listed if c not in full]
            firsts = [kind[0] if kind else 0 for kind in (full, partial)]
            last = [0, *full, *partial][-1]
            entries[-1].append([row, len(blocks), len(full), len(partial), *firsts, last])
            blocks += full + partial
        entries[-1].sort(key=lambda entry: (-(entry[2] + entry[3]), -entry[0]))
    return entries, blocks


def is_full(tile: Tensor, size: int) -> bool:
    """Whether all keys of the block exist. Its queries need not: nothing reads their output."""
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
    assert lists.n_empty == sum(sum(entry[2:4]) == 0 for head in entries for entry in head)
    shown = BlockSparseMask(torch.ones_like(mask.layout), mask.block_size)
    assert lists.hides == bool(
        (elements(shown, seq_q, seq_k, causal, window_size) & ~visible).any()
    )

    # columns and rows list the same blocks with the same kinds
    kinds = kinds_of(entries, blocks)
    col_entries, col_blocks = lists.cols.tolist(), lists.col_blocks.tolist()
    assert kinds_of(col_entries, col_blocks) == {(h, c, r): k for (h, r, c), k in kinds.items()}
    for head in col_entries:
        lengths_first = [(-(entry[2] + entry[3]), entry[0]) for entry in head]
        assert lengths_first == sorted(lengths_first)  # ties: the earlier column first
        for _, begin, full, partial, first_full, first_partial, last in head:
            split, end = begin + full, begin + full + partial
            assert col_blocks[begin:split] == sorted(col_blocks[begin:split])
            assert col_blocks[split:end] == sorted(col_blocks[split:end])
            assert first_full == (col_blocks[begin] if full else 0)
            assert first_partial == (col_blocks[split] if partial else 0)
            assert last == (col_blocks[end - 1] if full + partial else 0)
    # blocks are stored head by head and column by column, without gaps
    begins = [(h, *entry[:2]) for h, head in enumerate(col_entries) for entry in head]
    lengths = [sum(entry[2:4]) for head in col_entries for entry in sorted(head)]
    assert [b for *_, b in sorted(begins)] == [sum(lengths[:n]) for n in range(len(lengths))]
    assert sum(lengths) == len(col_blocks) == len(blocks)


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


def test_lists_of_a_small_mask() -> None:
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

    no_blocks = BlockSparseMask(torch.zeros(2, 3, 4, dtype=torch.bool), 16)
    assert_lists_match(no_blocks, 48, 64)
    assert no_blocks.lists(48, 64).row_blocks.numel() == 0
    # causal with more queries than keys: the first queries see nothing
    assert_lists_match(BlockSparseMask(layout, 16), 48, 49, causal=True)
    one_column = BlockSparseMask(torch.ones(8, 1, dtype=torch.bool), 16)
    assert one_column.lists(128, 16, causal=True).row_blocks.numel() == 1


def test_an_all_true_mask_lists_the_blocks_of_dense_attention() -> None:
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
    mixed = mask.lists(140, 140, causal=True)
    every = mask.lists(140, 140, causal=True, all_partial=True)
    assert not every.rows[..., 2].any() and not every.cols[..., 2].any()
    assert torch.equal(every.rows[..., 3], mixed.rows[..., 2] + mixed.rows[..., 3])
    assert (every.n_full, every.n_partial) == (0, mixed.n_full + mixed.n_partial)
    # in each row only the diagonal block, the last one, is partial: the order is the same
    assert torch.equal(every.row_blocks, mixed.row_blocks)


def test_a_strided_layout() -> None:
    layout = torch.rand(6, 4, generator=torch.Generator().manual_seed(0)) < 0.5
    mask = BlockSparseMask(layout.T, 16)
    assert_lists_match(mask, 64, 96)
    assert mask.digest == BlockSparseMask(layout.T.contiguous(), 16).digest


@pytest.mark.parametrize("window_size", [0, -3])
def test_windows_without_the_query_itself_are_refused(window_size: int) -> None:
    mask = BlockSparseMask(butterfly(4), 16)
    for method in (mask.lists, mask.to_flex):
        with pytest.raises(ValueError, match=f"window_size must be at least 1.*got {window_size}"):
            method(64, 64, window_size=window_size)


def test_lists_in_unsupported_block_sizes_are_refused() -> None:
    for size, block_size in ((32, 128), (16, 32), (64, 60)):
        with pytest.raises(
            ValueError, match=f"block_size={block_size} of lists must be .* {size}, that"
        ):
            BlockSparseMask(torch.eye(4, dtype=torch.bool), size).lists(
                4 * size, 4 * size, block_size=block_size
            )
