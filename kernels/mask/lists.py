"""Lists of the blocks that the kernels visit, made by `BlockSparseMask.lists`."""

from typing import NamedTuple

import torch
from torch import Tensor

from .packing import with_parts
from .schedule import WINDOW_KEYS, walks_in_turns

ENTRY_NUMBERS = 7  # of `MaskLists.rows` and `.cols`


class MaskLists(NamedTuple):
    """The blocks to visit, by rows and by columns; tensors are int32, on one device.

    An entry of `rows` is (number of the row, position of its first block in `row_blocks`, number
    of full blocks, number of partial blocks, first full block, first partial block, last block of
    its list); the last three are 0 where there is none, and save the kernels a load that waits for
    another. Entries are sorted for programs that start in this order: a long row must not start
    last. Empty rows have entries too, for their output is 0.

    In packed lists, whose blocks of 64 hold smaller ones, numbers in `row_blocks` and `visits` and
    the last block of a row have which of its parts are there in their upper 16 bits, as
    `kernels.mask.packing.with_parts` puts them.
    """

    rows: Tensor  # (H_m, n_q_blocks, 7), most blocks first; of equals, the later row first
    row_blocks: Tensor  # (nnz,) column numbers: head by head, row by row, full before partial
    cols: Tensor  # (H_m, n_k_blocks, 7), most blocks first; of equals, the earlier column first
    col_blocks: Tensor  # (nnz,) row numbers: head by head, column by column, full before partial
    # for programs that add to rows in turns, in the order in which they are drawn: (number of the
    # column, and in the upper 16 bits, if it is cut, 1 + the number of the piece; positions in
    # `visits` where its own begin and end), and
    walks: Tensor | None  # (H_m, n_k_blocks or more, 3)
    # (number of the row, 2 * how many walks visit it before + 1 if others do so after it)
    visits: Tensor | None  # (nnz, 2)
    # (number of the column, its first piece, the end of its pieces); None if none is cut
    cuts: Tensor | None  # (n, 3)
    n_full: int  # of all heads
    n_partial: int  # of all heads; n_full + n_partial is nnz
    n_empty: int  # rows without a block, of all heads
    hides: bool  # whether the layout leaves out a block in which some query would see some key
    block_size: int  # of these blocks
    packed: bool


def make_lists(
    full: Tensor,
    partial: Tensor,
    layout: Tensor,
    parts: Tensor | None,
    *,
    all_partial: bool,
    longest_column_first: bool,
    in_turns: bool,
    block_size: int,
    hides: bool,
    device: torch.device,
) -> MaskLists:
    """Lists of blocks that are full and blocks that are partial.

    Args:
        full, partial: (H_m, n_q_blocks, n_k_blocks) bool, no block both.
        layout: of the same shape, where a block may be, whatever causal and a window hide.
        parts: int64 of the same shape, of packed lists: `kernels.mask.packing.parts_of`.
        all_partial, longest_column_first, in_turns: as `BlockSparseMask.lists` takes them.
        block_size: of these blocks; hides: as in `MaskLists`; device: of the lists.
    """
    if all_partial:
        full, partial = torch.zeros_like(full), full | partial
    columns = "longest, then first" if longest_column_first else "first"
    by_row = _entries(full, partial, order="longest, then last", parts=parts)
    by_column = _entries(full.mT, partial.mT, order=columns)
    walks, visits, cuts = None, None, None
    if in_turns:
        turns = walks_in_turns(
            full | partial,
            layout,
            one_order=not longest_column_first,
            window=WINDOW_KEYS // block_size,
            parts=parts,
        )
        walks, visits, cuts = (None if x is None else x.to(device) for x in turns)
    return MaskLists(
        *(x.to(device) for x in (*by_row, *by_column)),
        walks=walks,
        visits=visits,
        cuts=cuts,
        n_full=int(full.sum()),
        n_partial=int(partial.sum()),
        n_empty=int((~(full | partial).any(-1)).sum()),
        hides=hides,
        block_size=block_size,
        packed=parts is not None,
    )


def _entries(
    full: Tensor, partial: Tensor, *, order: str, parts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Entries and blocks of MaskLists for two (H_m, n, m) bool tensors, by their rows.

    Entries in `order`: "longest, then last", "longest, then first", or "first", that of the rows.
    """
    kinds = torch.stack((full, partial), dim=2)  # (H_m, n, 2, m): the order of the blocks
    head, row, _, blocks = kinds.nonzero().unbind(1)
    counts = kinds.sum(-1)
    length = counts.sum(-1)  # (H_m, n)
    n = length.shape[1]
    begin = length.flatten().cumsum(0).view(length.shape) - length
    number = torch.arange(n, device=full.device).expand(length.shape)
    first = kinds.int().argmax(-1)
    m = kinds.shape[-1]
    of_kind = m - 1 - kinds.flip(-1).int().argmax(-1)  # of no use where there is none
    last = of_kind[..., 1].where(counts[..., 1] > 0, of_kind[..., 0]).where(length > 0, 0)
    if parts is not None:
        blocks = with_parts(blocks, parts[head, row, blocks])
        last = with_parts(last, parts.take_along_dim(last.unsqueeze(-1), dim=2).squeeze(-1))
    entries = torch.stack((number, begin, *counts.unbind(-1), *first.unbind(-1), last), dim=-1)
    if order != "first":
        ties = number if order == "longest, then last" else n - 1 - number
        ranks = (length * n + ties).argsort(dim=1, descending=True)  # no two are equal
        entries = entries.take_along_dim(ranks.unsqueeze(-1), dim=1)
    return entries.int(), blocks.int()
