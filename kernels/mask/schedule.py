"""dq schedule of a block-sparse mask: order of the columns, and of the rows within each column.

A program of a backward pass owns a column of blocks and adds to dq of the rows that it visits. If
several programs add to one row, they do so in the order in which they took their columns, so that
the sum is the same in every run. A semaphore makes them wait for each other.

A column that is much longer than the others, such as one that all rows see, is split between
programs, and their sums are added at the end.
"""

import heapq
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .packing import with_parts

SPLIT_VISITS = 16  # columns up to this length are not split
SPLIT_STRIDE = 1 << 16  # a split column's number is column + SPLIT_STRIDE * (1 + split)
WINDOW_KEYS = 32_768  # keys whose columns are scheduled together
# Parameters of the simulation. Times are in units of a visit: BETWEEN two columns of a program, and
# for the SIGNAL by which another program learns that a visit is over.
PROGRAMS = 66  # programs that work on one head at a time
BETWEEN, SIGNAL = 1.0, 0.3


def schedule_dq(
    blocks: Tensor, layout: Tensor, one_order: bool, window: int, parts: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Make `col_ranges`, `visits` and `cuts` of `kernels.mask.lists.MaskLists`.

    Programs wait least if those that run at the same time are never at the same row. Therefore
    consecutive columns share no row where possible, and each column visits its rows in the order of
    their colours. Two rows that share a column have different colours. Columns are ordered within
    windows, whose rows a cache can hold. Colours are those of the whole layout, because they also
    keep programs apart if a causal mask leaves out some blocks. But then columns differ in length,
    so within one window a simulation decides: each column first visits rows that are free.

    Args:
        blocks: (H_m, n_q_blocks, n_k_blocks) bool, the blocks to visit.
        layout: same shape, the blocks of the mask.
        one_order: use the same order of columns for all heads.
        window: number of columns in a window, at least 1.
        parts: int64, same shape, for packed lists: `kernels.mask.packing.parts_of`.

    Raises:
        ValueError: column numbers do not fit into 16 bits.
    """
    blocks, layout = blocks.cpu(), layout.cpu()
    splits = _split_columns(blocks)
    if len(splits.numbers) > SPLIT_STRIDE:
        raise ValueError(
            f"layout has {len(splits.numbers)} columns and splits of columns, but there are only "
            f"numbers for {SPLIT_STRIDE}: use larger blocks, or impl='triton'"
        )
    # Split columns are simulated as well: their rows all have different colours.
    simulated = layout.shape[2] <= window or splits.cuts is not None
    if splits.cuts is not None:
        blocks, layout = (_by_split(kind, blocks, splits) for kind in (blocks, layout))
    heads = layout.any(0, keepdim=True) if one_order else layout
    orders = [_order_columns(head, window, splits.numbers >= SPLIT_STRIDE) for head in heads]
    orders *= len(layout) // len(orders)
    parts = None if parts is None else parts.cpu()
    col_ranges, visits, n = [], [], 0
    for head, whole, (columns, colours) in zip(blocks, layout, orders, strict=True):
        # Semaphore values: twice the number of earlier visits to the row, + 1 if others follow.
        ordered = head.T[columns]
        so_far = ordered.int().cumsum(0)
        semaphore = 2 * (so_far - 1) + (so_far < so_far[-1:]).int()

        # Visits of each column, sorted by the time at which the row is free in the simulation, then
        # by colour.
        counts = ordered.sum(1)
        column, row = np.nonzero(ordered.numpy())
        ready = np.zeros(len(row))
        if simulated and not torch.equal(head, whole):
            ready = _ready_times(row, counts.numpy(), colours)
        order = np.lexsort((colours[row], ready, column))
        column, row = torch.from_numpy(column[order]), torch.from_numpy(row[order])
        ends = counts.cumsum(0) + n
        col_ranges.append(torch.stack((splits.numbers[columns], ends - counts, ends), dim=1))
        number = row
        if parts is not None:
            mask_column = splits.numbers[columns[column]] % SPLIT_STRIDE
            number = with_parts(number, parts[len(col_ranges) - 1][row, mask_column])
        visits.append(torch.stack((number, semaphore[column, row]), dim=1))
        n = int(ends[-1])
    return torch.stack(col_ranges).int(), torch.cat(visits).int(), splits.cuts


class _Splits(NamedTuple):
    """Splits of all columns, in the order of the columns; most columns have only one."""

    numbers: Tensor  # (splits,): column, + SPLIT_STRIDE * (1 + split) if the column has several
    visits: Tensor  # (columns,): number of visits of a split, in the head that has the most
    cuts: Tensor | None  # of `kernels.mask.lists.MaskLists`


def _split_columns(blocks: Tensor) -> _Splits:
    """Split the columns that are too long, into the same number of splits in all heads."""
    lengths = blocks.sum(1).amax(0)
    n_splits = (-(-lengths // _length_limit(lengths))).clamp(min=1)
    column = torch.arange(len(lengths)).repeat_interleave(n_splits)
    is_split = n_splits[column] > 1
    numbers = column + SPLIT_STRIDE * is_split * is_split.cumsum(0)
    ends = n_splits.where(n_splits > 1, 0).cumsum(0)
    cuts = torch.stack((torch.arange(len(lengths)), ends - n_splits, ends), dim=1)
    cuts = cuts[n_splits > 1].int()
    return _Splits(numbers, -(-lengths // n_splits), cuts if len(cuts) else None)


def _length_limit(lengths: Tensor) -> int:
    """Maximum visits of a column (or row) that does not count as long: twice the mean.

    The mean is over non-empty columns; up to SPLIT_VISITS, none counts as long.
    """
    mean = lengths.sum() / (lengths > 0).sum().clamp(min=1)
    return max(SPLIT_VISITS, int(2 * mean))


def _by_split(layout: Tensor, blocks: Tensor, splits: _Splits) -> Tensor:
    """Divide the columns of `layout` evenly by visits of `blocks`: (H_m, n_q_blocks, splits)."""
    column = splits.numbers % SPLIT_STRIDE
    split = torch.arange(len(column)) - torch.searchsorted(column, column)
    before = blocks.cumsum(1) - blocks.int()  # visits of the column before each row
    last = (torch.bincount(column) - 1)[column]
    split_of_row = (before[..., column] // splits.visits.clamp(min=1)[column]).minimum(last)
    return layout[..., column] & (split_of_row == split)


def _ready_times(rows: np.ndarray, counts: np.ndarray, colours: np.ndarray) -> np.ndarray:
    """Simulate the schedule: the time at which each visit could start, if a visit takes 1.

    A program takes the next column when it has finished one, and waits for rows in use. `rows` has
    the rows of the visits of all columns, in order, and `counts` the number of visits per column.
    """
    free = [0.0] * PROGRAMS
    done = np.zeros(len(colours))
    ready = np.empty(len(rows))
    end = 0
    for count in counts:
        # The program that is free first takes this column, which starts after its fixed costs.
        first, end = end, end + count
        start = heapq.heappop(free) + BETWEEN
        row = rows[first:end]
        ready[first:end] = times = np.maximum(done[row] + SIGNAL, start)
        order = np.lexsort((colours[row], times))
        step = np.arange(count)
        # Visits follow one another, none before its row is free.
        done[row[order]] = finished = np.maximum.accumulate(times[order] - step) + step + 1
        heapq.heappush(free, finished[-1] if count else start)
    return ready


def _order_columns(layout: Tensor, window: int, late: Tensor) -> tuple[Tensor, np.ndarray]:
    """Order of the columns, and colours of the rows, of a layout (n_q_blocks, n_k_blocks).

    Columns of a window are ordered by colour. Columns that are `late`, (n_k_blocks,) bool, come
    last: they are long, and others would wait for their rows.
    """
    # In NumPy, so that a counter of a model's FLOPs does not see these products.
    visible = layout.float().numpy()
    # Rows that nearly all columns share would give all columns different colours: ignore them.
    lengths = layout.sum(1)
    last_first = visible[(lengths <= _length_limit(lengths)).numpy(), ::-1]
    colours = _color(last_first.T @ last_first > 0)
    n = len(colours)
    windows = np.arange(n) // window
    columns = n - 1 - np.lexsort((colours, late.numpy()[::-1], windows))
    return torch.from_numpy(columns), _color(visible @ visible.T > 0)


def _color(conflicts: np.ndarray) -> np.ndarray:
    """Greedy colouring of n items: each gets the first colour that none of its conflicts has.

    `conflicts` is (n, n) bool.
    """
    n = len(conflicts)
    taken = np.zeros((n, n + 1), dtype=bool)  # by item and colour
    colours = np.zeros(n, dtype=np.int64)
    for i in range(n):
        # argmin of bools is the first False. Column n is never taken, so there always is one.
        colours[i] = taken[i].argmin()
        taken[conflicts[i], colours[i]] = True
    return colours
