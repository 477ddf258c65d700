"""Lists of the blocks that the kernels visit, made by `BlockSparseMask.lists`."""

from typing import NamedTuple

import torch
from torch import Tensor

from .packing import with_parts
from .schedule import WINDOW_KEYS, schedule_dq

ENTRY_NUMBERS = 7  # numbers in an entry of `MaskLists.rows` and `.cols`


class MaskLists(NamedTuple):
    """Lists of the blocks to visit, by rows and by columns. Tensors are int32, on one device.

    An entry of `rows` is (row number, position of its first block in `row_blocks`, number of full
    blocks, number of partial blocks, first full block, first partial block, last block of the row).
    The last three are 0 if there is no such block; they save the kernels a load that waits for
    another. Programs start in the order of the entries, as a long row must not start last. Empty
    rows have entries as well, because their output of 0 must be written.

    The dq schedule is for kernels in which programs own columns and add to rows of dq. Programs add
    to a row in the order in which they take the columns. A semaphore enforces this: its value in
    `visits` is 2 * the number of earlier visits to the row, + 1 if there are later ones. A column
    that is much longer than others is split, and each split is a column of `col_ranges`.

    In packed lists, blocks of 64 hold smaller ones. The blocks in `row_blocks`, the rows in
    `visits` and the last block of a row then carry the bits of their parts, as in
    `kernels.mask.packing.with_parts`.
    """

    rows: Tensor  # (H_m, n_q_blocks, 7), most blocks first, then the later row first
    row_blocks: Tensor  # (nnz,) column numbers: head by head, row by row, full before partial
    cols: Tensor  # (H_m, n_k_blocks, 7), most blocks first, then the earlier column first
    col_blocks: Tensor  # (nnz,) row numbers: head by head, column by column, full before partial
    # dq schedule, or None: (column number + SPLIT_STRIDE * (1 + split number, if split), begin and
    # end in `visits`), in the order in which programs take the columns.
    col_ranges: Tensor | None  # (H_m, n_k_blocks or more, 3)
    visits: Tensor | None  # (nnz, 2): row number, semaphore value
    cuts: Tensor | None  # (n, 3): number, first split, end of splits of each split column
    n_full: int  # of all heads
    n_partial: int  # of all heads; n_full + n_partial is nnz
    n_empty: int  # rows without a block, of all heads
    hides: bool  # whether the layout leaves out a block in which some query would see some key
    block_size: int  # of the blocks in these lists
    packed: bool


def make_lists(
    full: Tensor, partial: Tensor, layout: Tensor, parts: Tensor | None, block_size: int,
    hides: bool, device: torch.device, all_partial: bool, longest_column_first: bool,
    dq_schedule: bool,
) -> MaskLists:  # fmt: skip
    """Make the lists of full and partial blocks; arguments as in `BlockSparseMask.lists`, and:

    Args:
        full, partial: (H_m, n_q_blocks, n_k_blocks) bool; no block is both.
        layout: same shape; blocks of the mask before causal masks and windows.
        parts: int64, same shape, for packed lists: `kernels.mask.packing.parts_of`.
    """
    if all_partial:
        full, partial = torch.zeros_like(full), full | partial
    columns = "longest, then first" if longest_column_first else "first"
    by_row = _entries(full, partial, order="longest, then last", parts=parts)
    by_column = _entries(full.mT, partial.mT, order=columns)
    blocks, window = full | partial, WINDOW_KEYS // block_size
    schedule: tuple[Tensor | None, ...] = None, None, None
    if dq_schedule:
        schedule = schedule_dq(blocks, layout, not longest_column_first, window, parts)
    col_ranges, visits, cuts = (None if x is None else x.to(device) for x in schedule)
    return MaskLists(
        *(x.to(device) for x in (*by_row, *by_column)),
        col_ranges=col_ranges, visits=visits, cuts=cuts,
        n_full=int(full.sum()), n_partial=int(partial.sum()), n_empty=int((~blocks.any(-1)).sum()),
        hides=hides, block_size=block_size, packed=parts is not None,
    )  # fmt: skip


def _entries(
    full: Tensor, partial: Tensor, *, order: str, parts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Entries and blocks of `MaskLists`, by rows, from two (H_m, n, m) bool tensors.

    The order of entries is "longest, then last", "longest, then first", or "first" (by row number).
    """
    kinds = torch.stack((full, partial), dim=2)  # (H_m, n, 2, m): the order of the blocks
    head, row, _, blocks = kinds.nonzero().unbind(1)
    counts = kinds.sum(-1)
    length = counts.sum(-1)  # (H_m, n)
    n, m = kinds.shape[1], kinds.shape[3]
    begin = length.flatten().cumsum(0).view(length.shape) - length
    number = torch.arange(n, device=full.device).expand(length.shape)
    # argmax returns the first maximum: the first block of a kind or, if flipped, the last. The last
    # ones of rows without any block are replaced by 0.
    first = kinds.int().argmax(-1)
    last_of_kind = m - 1 - kinds.flip(-1).int().argmax(-1)
    last = last_of_kind[..., 1].where(counts[..., 1] > 0, last_of_kind[..., 0])
    last = last.where(length > 0, 0)
    if parts is not None:
        blocks = with_parts(blocks, parts[head, row, blocks])
        last = with_parts(last, parts.take_along_dim(last.unsqueeze(-1), dim=2).squeeze(-1))
    entries = torch.stack((number, begin, *counts.unbind(-1), *first.unbind(-1), last), dim=-1)
    if order != "first":
        # One integer sorts by both keys. No two are equal, so the order does not depend on argsort.
        ties = number if order == "longest, then last" else n - 1 - number
        ranks = (length * n + ties).argsort(dim=1, descending=True)
        entries = entries.take_along_dim(ranks.unsqueeze(-1), dim=1)
    return entries.int(), blocks.int()
