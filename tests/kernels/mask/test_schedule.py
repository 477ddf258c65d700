"""The dq schedule: every visit occurs once, and semaphores follow the order of the columns."""

import heapq
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels.mask import schedule
from kernels.mask.block_mask import BlockSparseMask
from kernels.mask.patterns import butterfly
from kernels.mask.schedule import SPLIT_STRIDE, SPLIT_VISITS, schedule_dq


def coin_flips(*shape: int, density: float, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator) < density


def rows_of(ranges: Tensor, visits: Tensor) -> list[list[int]]:
    """Rows that each column of one head visits, in the order of the schedule."""
    return [visits[first:end, 0].tolist() for _, first, end in ranges.tolist()]


@given(
    n_rows=st.integers(1, 40),
    n_columns=st.integers(1, 40),
    n_head=st.integers(1, 3),
    density=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    seed=st.integers(0, 2**31),
    one_order=st.booleans(),
)
def test_each_block_is_visited_once_and_semaphores_follow_their_order(
    n_rows: int, n_columns: int, n_head: int, density: float, seed: int, one_order: bool
) -> None:
    layout = coin_flips(n_head, n_rows, n_columns, density=density, seed=seed)
    layout[:, :, 0] = True  # may be long enough to be split
    blocks = layout & coin_flips(n_head, n_rows, n_columns, density=0.7, seed=seed + 1)
    all_ranges, all_visits, cuts = schedule_dq(blocks, layout, one_order=one_order, window=16)
    assert all_ranges.dtype == all_visits.dtype == torch.int32
    splits = {} if cuts is None else {column: end - i for column, i, end in cuts.tolist()}
    assert all_ranges.shape == (n_head, n_columns + sum(splits.values()) - len(splits), 3)
    visits, n_visits = all_visits.tolist(), 0
    for visible, ranges in zip(blocks, all_ranges.tolist(), strict=True):
        counts = [0] * n_rows
        visited: dict[int, list[int]] = {}
        for number, first, end in ranges:
            assert first == n_visits
            n_visits = end
            column = number % SPLIT_STRIDE
            assert (number >= SPLIT_STRIDE) == (column in splits)
            visited.setdefault(column, []).extend(row for row, _ in visits[first:end])
            for row, semaphore in visits[first:end]:
                counts[row] += 1
                assert semaphore == 2 * (counts[row] - 1) + (counts[row] < int(visible[row].sum()))
        for column in range(n_columns):
            assert sorted(visited[column]) == visible[:, column].nonzero().flatten().tolist()
    assert n_visits == len(visits) == int(blocks.sum())
    if one_order:
        assert (all_ranges[..., 0] == all_ranges[:1, :, 0]).all()


def test_consecutive_columns_share_no_row() -> None:
    # 128 blocks are a perfect code: 8 sets of 16 columns that see each row once
    layout = butterfly(128).unsqueeze(0)
    ranges, visits, _ = schedule_dq(layout, layout, one_order=False, window=128)
    rows = rows_of(ranges[0], visits)
    for i in range(0, 128, 16):
        assert sorted(itertools.chain(*rows[i : i + 16])) == list(range(128))
        # at each step all sets visit the rows of one color
        for step in range(8):
            assert {row[step] for row in rows[i : i + 16]} == {row[step] for row in rows[:16]}


def waits(rows: list[list[int]], programs: int, signal: float) -> tuple[float, float]:
    """Total time that programs wait, and the time when the last one is done.

    Programs take columns in order, and need a time of 1 per row and 1 between two columns.
    """
    free, done, waited = [0.0] * programs, {}, 0.0
    for column in rows:
        now = heapq.heappop(free) + 1.0
        for row in column:
            start = max(now, done.get(row, 0.0) + signal)
            waited += start - now
            now = done[row] = start + 1.0
        heapq.heappush(free, now)
    return waited, max(free)


@pytest.mark.parametrize("n", [128, 256])
def test_causal_columns_first_visit_rows_that_no_other_column_visits(n: int) -> None:
    layout = butterfly(n).unsqueeze(0)
    one_window, many_windows = (
        rows_of(ranges[0], visits)
        for ranges, visits, _ in (
            schedule_dq(layout.tril(), layout, one_order=False, window=window)
            for window in (n, n - 1)  # with several windows, only colors keep programs apart
        )
    )
    for signal in (0.3, 1.0):
        assert waits(one_window, 66, signal)[0] < 0.6 * waits(many_windows, 66, signal)[0]


def test_long_layouts_are_scheduled_one_window_at_a_time() -> None:
    layout = butterfly(512).unsqueeze(0)
    ranges, _, cuts = schedule_dq(layout.tril(), layout, one_order=False, window=128)
    assert cuts is None
    columns = ranges[0, :, 0].view(4, 128).sort(dim=1).values
    assert torch.equal(columns.flip(0).flatten(), torch.arange(512, dtype=torch.int32))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_a_mask_lists_the_visits_of_visible_blocks(causal: bool) -> None:
    mask = BlockSparseMask(coin_flips(2, 9, 9, density=0.5), 16)
    assert mask.lists(140, 140, causal=causal).col_ranges is None
    lists = mask.lists(140, 140, causal=causal, dq_schedule=True)
    blocks = mask.layout & torch.ones(9, 9, dtype=torch.bool).tril(0 if causal else 9)
    expected = schedule_dq(blocks, mask.layout, one_order=False, window=1024)
    assert torch.equal(lists.col_ranges, expected[0]) and torch.equal(lists.visits, expected[1])
    assert lists.cuts is expected[2] is None
    # heads that share a program visit columns in one order
    grouped = mask.lists(140, 140, causal=causal, longest_column_first=False, dq_schedule=True)
    assert torch.equal(grouped.col_ranges[0, :, 0], grouped.col_ranges[1, :, 0])


@pytest.mark.parametrize("n", [128, 512])
def test_a_column_that_all_rows_see_is_split_so_that_others_wait_less(
    n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = butterfly(n, global_blocks=1).unsqueeze(0)

    def split_schedule() -> tuple[Tensor, Tensor, Tensor | None]:
        return schedule_dq(layout.tril(), layout, one_order=False, window=256)

    split_ranges, visits, cuts = split_schedule()
    assert cuts is not None and cuts.tolist() == [[0, 0, n // SPLIT_VISITS]]
    lengths = split_ranges[0, :, 2] - split_ranges[0, :, 1]
    assert lengths.max() == SPLIT_VISITS
    # splits are numbered in the order of their rows
    rows = {number // SPLIT_STRIDE: visits[i:end, 0] for number, i, end in split_ranges[0].tolist()}
    for split in range(n // SPLIT_VISITS):
        assert rows[1 + split].sort().values.tolist() == [
            *range(SPLIT_VISITS * split, SPLIT_VISITS * (split + 1))
        ]
    monkeypatch.setattr(schedule, "SPLIT_VISITS", n)
    whole, whole_visits, no_cuts = split_schedule()
    assert no_cuts is None
    times = [
        waits(rows_of(*schedule_of_head), 66, 0.3)[1]
        for schedule_of_head in ((split_ranges[0], visits), (whole[0], whole_visits))
    ]
    assert times[0] < 0.7 * times[1]


def test_too_many_columns_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(schedule, "SPLIT_STRIDE", 8)
    layout = torch.eye(9, dtype=torch.bool).unsqueeze(0)
    schedule_dq(layout[:, :8, :8], layout[:, :8, :8], one_order=False, window=9)
    with pytest.raises(ValueError, match="layout has 9 columns.*numbers for 8: use larger blocks"):
        schedule_dq(layout, layout, one_order=False, window=9)
