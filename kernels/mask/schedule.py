"""In which order programs draw the columns of a block-sparse mask, and each visits its rows.

A program of a backward pass owns a column of blocks and adds to the rows that it visits. If several
do so to one row, they take turns in the order in which their columns are drawn, so that the sum is
the same in every run; and they wait.

A column that is much longer than the others, such as one that all rows see, is cut into pieces,
each for a program of its own. What they find is added up at the end.
"""

import heapq
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .packing import with_parts

PIECE_VISITS = 16  # of a column that is never too long
PIECE = 1 << 16  # what the number of a piece is multiplied by, beside that of its column
WINDOW_KEYS = 32_768  # of columns whose programs run side by side
PROGRAMS = 66  # that are at the columns of one head at a time
BETWEEN, TOLD = 1.0, 0.3  # two columns; until others know that a visit is over: in visits


def walks_in_turns(
    blocks: Tensor,
    layout: Tensor,
    *,
    one_order: bool,
    window: int,
    parts: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`walks`, `visits` and `cuts` of `kernels.mask.lists.MaskLists`.

    Programs wait least if those that run side by side are never at the same row. So the columns
    that are drawn one after the other share no row, and each visits its rows in the order of
    colours, no two of which are the same. A window of columns at a time, whose rows a cache can
    hold. Colours are those of the whole layout: where a causal mask leaves out some blocks they
    still keep programs apart. But columns are of different lengths then, and within one window each
    visits first what nobody else is at.

    Args:
        blocks: (H_m, n_q_blocks, n_k_blocks) bool, those that are visited.
        layout: of the same shape, those of the mask.
        one_order: the same order of columns for all heads.
        window: columns, at least 1.
        parts: of packed lists, int64 of the same shape, from `kernels.mask.packing.parts_of`.

    Raises:
        ValueError: there are more columns than have numbers of 16 bits.
    """
    blocks, layout = blocks.cpu(), layout.cpu()
    simulated = layout.shape[2] <= window
    cut = _cut_columns(blocks)
    if len(cut.numbers) > PIECE:
        raise ValueError(
            f"layout has {len(cut.numbers)} columns and pieces of columns, and there are numbers "
            f"for {PIECE}: use larger blocks, or impl='triton'"
        )
    if cut.cuts is not None:
        simulated = True  # colours of rows that are in one piece are all different
        blocks, layout = (_pieces_of(kind, blocks, cut) for kind in (blocks, layout))
    heads = layout.any(0, keepdim=True) if one_order else layout
    orders = [_drawing_order(head, window, cut.numbers >= PIECE) for head in heads]
    orders *= len(layout) // len(orders)
    parts = None if parts is None else parts.cpu()
    walks, visits, n = [], [], 0
    for head, whole, (columns, colours) in zip(blocks, layout, orders, strict=True):
        drawn = head.T[columns]
        before = drawn.int().cumsum(0)
        turn = 2 * (before - 1) + (before < before[-1:]).int()
        counts = drawn.sum(1)
        column, row = np.nonzero(drawn.numpy())
        ready = np.zeros(len(row))
        if simulated and not torch.equal(head, whole):
            ready = _ready_times(row, counts.numpy(), colours)
        order = np.lexsort((colours[row], ready, column))
        column, row = torch.from_numpy(column[order]), torch.from_numpy(row[order])
        ends = counts.cumsum(0) + n
        walks.append(torch.stack((cut.numbers[columns], ends - counts, ends), dim=1))
        number = row
        if parts is not None:
            of_column = cut.numbers[columns[column]] % PIECE
            number = with_parts(number, parts[len(walks) - 1][row, of_column])
        visits.append(torch.stack((number, turn[column, row]), dim=1))
        n = int(ends[-1])
    return torch.stack(walks).int(), torch.cat(visits).int(), cut.cuts


class _Cut(NamedTuple):
    """Columns in pieces, in the order of the columns."""

    numbers: Tensor  # (pieces,): the column of each, + PIECE * (1 + its number if there are others)
    visits: Tensor  # (columns,): of one head at most, of a piece of each column
    cuts: Tensor | None  # of `kernels.mask.lists.MaskLists`


def _cut_columns(blocks: Tensor) -> _Cut:
    """Cut the columns that are too long, each into as many pieces in all heads."""
    lengths = blocks.sum(1).amax(0)
    n_pieces = (-(-lengths // _longest(lengths))).clamp(min=1)
    column = torch.arange(len(lengths)).repeat_interleave(n_pieces)
    of_cut = n_pieces[column] > 1
    numbers = column + PIECE * of_cut * of_cut.cumsum(0)
    cuts = None
    if of_cut.any():
        ends = n_pieces.where(n_pieces > 1, 0).cumsum(0)
        cuts = torch.stack((torch.arange(len(lengths)), ends - n_pieces, ends), dim=1)
        cuts = cuts[n_pieces > 1].int()
    return _Cut(numbers, -(-lengths // n_pieces), cuts)


def _longest(lengths: Tensor) -> int:
    """Visits up to which a column or row is not too long: PIECE_VISITS, or twice the mean of those
    that have any."""
    mean = lengths.sum() / (lengths > 0).sum().clamp(min=1)
    return max(PIECE_VISITS, int(2 * mean))


def _pieces_of(layout: Tensor, blocks: Tensor, cut: _Cut) -> Tensor:
    """A layout (H_m, n_q_blocks, n_k_blocks) by pieces instead of columns, as many of `blocks` in
    each."""
    column = cut.numbers % PIECE
    piece = torch.arange(len(column)) - torch.searchsorted(column, column)
    before = blocks.cumsum(1) - blocks.int()  # visits of the column
    last = (torch.bincount(column) - 1)[column]
    of_row = (before[..., column] // cut.visits.clamp(min=1)[column]).minimum(last)
    return layout[..., column] & (of_row == piece)


def _ready_times(rows: np.ndarray, counts: np.ndarray, colours: np.ndarray) -> np.ndarray:
    """When each row is free for the column that visits it, if a program draws the next column as
    soon as it is done with one.

    Args:
        rows: of the visits of all columns, in the order of the drawing; counts: of each column.
        colours: of all rows.

    Returns:
        A time for each visit, which itself takes 1.
    """
    free = [0.0] * PROGRAMS
    done = np.zeros(len(colours))
    ready = np.empty(len(rows))
    end = 0
    for count in counts:
        first, end = end, end + count
        start = heapq.heappop(free) + BETWEEN
        row = rows[first:end]
        ready[first:end] = at = np.maximum(done[row] + TOLD, start)
        order = np.lexsort((colours[row], at))
        step = np.arange(count)
        # one after the other, and none before it is free
        done[row[order]] = finished = np.maximum.accumulate(at[order] - step) + step + 1
        heapq.heappush(free, finished[-1] if count else start)
    return ready


def _drawing_order(layout: Tensor, window: int, late: Tensor) -> tuple[Tensor, np.ndarray]:
    """The order of columns, and colours of rows, of a layout (n_q_blocks, n_k_blocks).

    The `late` columns, (n_k_blocks,) bool, come last in their window: they are long, and others
    would wait for the rows that they are at.
    """
    shown = layout.float().numpy()  # whose products are none of a model that counts its FLOPs
    # rows that nearly all columns share would leave all columns with different colours
    lengths = layout.sum(1)
    last_first = shown[(lengths <= _longest(lengths)).numpy(), ::-1]
    colours = _first_fit(last_first.T @ last_first > 0)
    n = len(colours)
    windows = np.arange(n) // window
    columns = n - 1 - np.lexsort((colours, late.numpy()[::-1], windows))
    return torch.from_numpy(columns), _first_fit(shown @ shown.T > 0)


def _first_fit(conflicts: np.ndarray) -> np.ndarray:
    """A colour for each of n things, the least that no earlier one has with which it conflicts.

    Args:
        conflicts: (n, n) bool, symmetric.
    """
    n = len(conflicts)
    taken = np.zeros((n, n + 1), dtype=bool)  # by thing and colour
    colours = np.zeros(n, dtype=np.int64)
    for i in range(n):
        colours[i] = taken[i].argmin()
        taken[conflicts[i], colours[i]] = True
    return colours
