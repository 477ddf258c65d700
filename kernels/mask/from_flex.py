"""Convert a BlockMask of FlexAttention: which options of `flash_attention` hide the same pairs.

An option hides more (query, key) pairs the tighter its value: a shorter window, a later start of a
document, a layout of fewer blocks. Each option has one tightest value that hides no visible pair,
and `_tightest_options` computes it. If all of them together still show a pair that the BlockMask
hides, then no other values can hide it, and the mask is refused. Otherwise, the options that turn
out to be unnecessary are dropped.

To compare, visible pairs are counted block by block: options that hide no visible pair show the
same pairs as the BlockMask if and only if the counts agree. Only partial blocks are evaluated, a
few at a time, so memory is linear in the size of the BlockMask.

Letters in shapes: B and H batch and heads of the BlockMask, n_q_blocks and n_k_blocks its rows and
columns of blocks.
"""

import math
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from ..limits import BLOCK_SIZES

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_MAX_PAIRS = 2**22  # evaluated at a time


class _Visible(NamedTuple):
    """Visible pairs of a BlockMask, summarised. Lengths are its own, blocks are square."""

    seq_q: int
    seq_k: int
    block_size: int
    counts: Tensor
    """(B, H, n_q_blocks, n_k_blocks) int32: number of visible pairs in each block."""
    first: Tensor
    """(B, T_q) int64: first key that a query sees in any head, T_k if there is none."""
    last: Tensor
    """(B, T_q) int64: last key that a query sees in any head, -1 if there is none."""

    @property
    def positions(self) -> Tensor:
        """Key position of each query, (T_q,) int64."""
        return torch.arange(self.seq_q, device=self.first.device) + self.seq_k - self.seq_q


def find_options(block_mask: "BlockMask") -> tuple[Tensor | None, int, dict[str, Any]]:
    """Find the layout and the other options that hide the same pairs as `block_mask`.

    Returns:
        layout (H_m, n_q_blocks, n_k_blocks) bool, or None if the other options suffice; its block
        size; the other options.

    Raises:
        ValueError: no layout and options hide exactly these pairs. The message names one.
    """
    partial, full, block_size = _layouts(block_mask)
    visible = _summarise(block_mask, partial, full, block_size)
    options = _tightest_options(visible)
    excess = _first_excess(visible, options)
    if excess is not None:
        _refuse(block_mask, visible, options, excess, bool(partial[tuple(excess)]))
    # Options that kernels serve with more work, or with more memory, are dropped first.
    for name in ("kv_lengths", "doc_start", "layout", "window_size", "causal"):
        others = {key: value for key, value in options.items() if key != name}
        if name in options and _is_exact(visible, others):
            options = others
    return options.pop("layout", None), block_size, options


def _layouts(block_mask: "BlockMask") -> tuple[Tensor, Tensor, int]:
    """Partial and full blocks, (B, H, n_q_blocks, n_k_blocks) bool, and their size.

    FlexAttention takes any block size, also different ones for queries and keys. Here, blocks are
    divided into the largest square ones that the kernels support.
    """
    from torch.nn.attention.flex_attention import BlockMask  # loads the compiler

    if not isinstance(block_mask, BlockMask):
        raise ValueError(
            "block_mask must be a BlockMask of torch.nn.attention.flex_attention, got "
            f"{type(block_mask).__name__}. Try create_block_mask(mask_mod, B, H, T_q, T_k)"
        )
    fitting = [size for size in BLOCK_SIZES if math.gcd(*block_mask.BLOCK_SIZE) % size == 0]
    if not fitting:
        raise ValueError(
            f"block_mask.BLOCK_SIZE={block_mask.BLOCK_SIZE} must be multiples of one of "
            f"{BLOCK_SIZES}. Try create_block_mask(..., BLOCK_SIZE=128)"
        )
    block_size = max(fitting)
    partial = _listed(block_mask, block_mask.kv_num_blocks, block_mask.kv_indices)
    full = torch.zeros_like(partial)
    if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
        full = _listed(block_mask, block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    for side, length, size in zip(
        (2, 3), block_mask.seq_lengths, block_mask.BLOCK_SIZE, strict=True
    ):
        starts = torch.arange(0, length, block_size, device=partial.device)
        partial, full = (x.index_select(side, starts // size) for x in (partial, full))
    return partial, full, block_size


def _listed(block_mask: "BlockMask", n_blocks: Tensor, indices: Tensor) -> Tensor:
    """Convert lists of blocks to a layout, (B, H, n_q_blocks, n_k_blocks) bool."""
    needed, n_columns = (
        -(-length // size)
        for length, size in zip(block_mask.seq_lengths, block_mask.BLOCK_SIZE, strict=True)
    )
    if indices.dim() != 4 or indices.shape[2] != needed:
        raise ValueError(
            f"block_mask.kv_indices={tuple(indices.shape)} must be (B, H, {needed}, n) for "
            f"seq_lengths={block_mask.seq_lengths} and BLOCK_SIZE={block_mask.BLOCK_SIZE}. Try the "
            "mask as create_block_mask returns it, without taking a slice"
        )
    is_listed = torch.arange(indices.shape[3], device=indices.device) < n_blocks.unsqueeze(-1)
    # Entries past the count of a row may be any numbers: they are written to a column of their own.
    columns = torch.where(is_listed, indices, n_columns).long()
    layout = is_listed.new_zeros(*indices.shape[:3], n_columns + 1)
    return layout.scatter_(3, columns, True)[..., :n_columns]


def _summarise(block_mask: "BlockMask", partial: Tensor, full: Tensor, block_size: int) -> _Visible:
    """Count the visible pairs, and find the first and the last visible key of each query."""
    seq_q, seq_k = block_mask.seq_lengths
    n_q_blocks = full.shape[2]
    starts = torch.arange(0, seq_k, block_size, device=full.device)
    ends = (starts + block_size).clamp(max=seq_k)
    row_starts = torch.arange(0, seq_q, block_size, device=full.device)
    n_queries = (seq_q - row_starts).clamp(max=block_size).unsqueeze(1)
    counts = (full * n_queries * (ends - starts)).int()
    in_some_head = full.any(1)
    first = torch.where(in_some_head, starts, seq_k).amin(2).repeat_interleave(block_size, 1)
    last = torch.where(in_some_head, ends - 1, -1).amax(2).repeat_interleave(block_size, 1)
    listed, n = partial.nonzero(), max(1, _MAX_PAIRS // block_size**2)
    for start in range(0, len(listed), n):
        blocks = listed[start : start + n]
        sees = _evaluate(block_mask, blocks, block_size)
        b, _, row, column = blocks.unbind(1)
        counts[tuple(blocks.unbind(1))] = sees.sum((1, 2), dtype=torch.int32)
        keys = _numbers(column, block_size).unsqueeze(1)
        queries = (_numbers(b * n_q_blocks + row, block_size)).flatten()
        lowest = torch.where(sees, keys, seq_k).amin(2).flatten()
        highest = torch.where(sees, keys, -1).amax(2).flatten()
        first.view(-1).scatter_reduce_(0, queries, lowest, "amin")
        last.view(-1).scatter_reduce_(0, queries, highest, "amax")
    return _Visible(seq_q, seq_k, block_size, counts, first[:, :seq_q], last[:, :seq_q])


def _evaluate(block_mask: "BlockMask", blocks: Tensor, block_size: int) -> Tensor:
    """Evaluate the mask_mod in N blocks, rows (b, h, row, column) of `blocks`.

    Returns (N, block_size, block_size) bool, False past the end of the sequences.
    """
    from torch.nn.attention.flex_attention import create_mask

    seq_q, seq_k = block_mask.seq_lengths
    b, h, row, column = blocks.unbind(1)
    queries, keys = _numbers(row, block_size), _numbers(column, block_size)
    # A mask_mod may look up tensors of the lengths of the sequences.
    q, k = queries.clamp(max=seq_q - 1), keys.clamp(max=seq_k - 1)

    def mask_mod(n: Tensor, _: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return block_mask.mask_mod(b[n], h[n], q[n, i], k[n, j])

    sees = create_mask(mask_mod, len(blocks), 1, block_size, block_size, device=blocks.device)
    return sees[:, 0] & (queries < seq_q).unsqueeze(2) & (keys < seq_k).unsqueeze(1)


def _numbers(blocks: Tensor, block_size: int) -> Tensor:
    """Numbers (N, block_size) of the tokens in each of N blocks."""
    return blocks.unsqueeze(1) * block_size + torch.arange(block_size, device=blocks.device)


def _tightest_options(visible: _Visible) -> dict[str, Any]:
    """Tightest value of each option that hides no visible pair, and `layout` for the mask."""
    first, last, p = visible.first, visible.last, visible.positions
    distance = torch.maximum(p - first, last - p).where(last >= 0, 0)
    layout = (visible.counts > 0).any(0)
    if (layout == layout[:1]).all():
        layout = layout[:1]
    options: dict[str, Any] = {
        "layout": layout,
        "window_size": int(distance.max()) + 1,
        "doc_start": first.int(),
        "kv_lengths": last.amax(1).int() + 1,
    }
    sees_later_key = (last > p) & (last >= 0)
    return options if sees_later_key.any() else {"causal": True, **options}


def _intervals(visible: _Visible, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Interval [lower, upper) of keys that each query sees without a layout, (B, T_q) each."""
    p, lower, upper = visible.positions, visible.first * 0, visible.first * 0 + visible.seq_k
    if options.get("causal"):
        upper = torch.minimum(upper, p + 1)
    if "window_size" in options:
        lower = torch.maximum(lower, p - options["window_size"] + 1)
        upper = torch.minimum(upper, p + options["window_size"])
    if "doc_start" in options:
        lower = torch.maximum(lower, options["doc_start"])
    if "kv_lengths" in options:
        upper = torch.minimum(upper, options["kv_lengths"].unsqueeze(1))
    return lower, upper


def _is_exact(visible: _Visible, options: dict[str, Any]) -> bool:
    """Whether `options`, which hide no visible pair, also show no other pair."""
    if "layout" in options:
        return _first_excess(visible, options) is None
    lower, upper = _intervals(visible, options)
    shown = (upper - lower).clamp(min=0).sum(1, keepdim=True)
    return bool((shown == visible.counts.sum((2, 3))).all())


def _first_excess(visible: _Visible, options: dict[str, Any]) -> list[int] | None:
    """First block (b, h, row, column) of which `options` show more pairs than are visible, or None.

    The options include a layout and hide no visible pair.
    """
    size, counts = visible.block_size, visible.counts
    batch, n_head, n_q_blocks, _ = counts.shape
    # Queries past the end of the sequence see no key.
    padding = (0, n_q_blocks * size - visible.seq_q)
    lower, upper = (F.pad(x, padding) for x in _intervals(visible, options))
    listed = options["layout"].expand(n_head, -1, -1).nonzero()
    n = max(1, _MAX_PAIRS // (batch * size))
    for first in range(0, len(listed), n):
        blocks = listed[first : first + n]
        head, row, column = blocks.unbind(1)
        queries, start = _numbers(row, size), column.unsqueeze(1) * size
        low, high = lower[:, queries].clamp(min=start), upper[:, queries].clamp(max=start + size)
        shown = (high - low).clamp(min=0).sum(2)
        excess = (shown != counts[:, head, row, column]).nonzero()
        if len(excess):
            b, i = excess[0].tolist()
            return [b, *blocks[i].tolist()]
    return None


def _refuse(
    block_mask: "BlockMask", visible: _Visible, options: dict[str, Any],
    block: list[int], is_partial: bool,
) -> NoReturn:  # fmt: skip
    """Raise an error that names a pair in `block` which `options` show and the mask hides."""
    b, h, row, column = block
    size, p, device = visible.block_size, visible.positions, visible.first.device
    sees = torch.zeros(size, size, dtype=torch.bool, device=device)
    if is_partial:
        sees = _evaluate(block_mask, torch.tensor([block], device=device), size)[0]
    lower, upper = (x[b, row * size :][:size, None] for x in _intervals(visible, options))
    keys = torch.arange(column * size, (column + 1) * size, device=device)
    shown = (keys >= lower) & (keys < upper)
    i, j = (shown & ~sees[: len(shown)]).nonzero()[0].tolist()
    query, key = row * size + i, column * size + j
    # Name a visible pair that rules out the one option that could hide this pair.
    if key > p[query]:
        other, later = ((visible.last > p) & (visible.last >= 0)).nonzero()[0].tolist()
        option, seen = "causal=True", int(visible.last[other, later])
        viewer = f"query {later} of sequence {other}"
    else:
        option, seen, viewer = "doc_start", int(visible.first[b, query]), "that query"
    message = (
        "block_mask must be cut by causal, window_size, doc_start and kv_lengths only. It hides "
        f"key {key} from query {query} (sequence {b}, head {h}, key block {column}), but {option} "
        f"would also hide key {seen} from {viewer}, which block_mask shows. "
    )
    if visible.seq_q != visible.seq_k:
        message += (
            f"Masks align at the bottom right: with T_q={visible.seq_q} and T_k={visible.seq_k}, "
            f"query {query} is at key position {int(p[query])}. "
        )
    raise ValueError(
        message + "Try flex_attention for this mask; papilio.flash_attn.flash_attn_varlen_func "
        "also serves bidirectional documents"
    )
