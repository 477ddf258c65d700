"""Attention of a rank at each step of the ring, and masks of all steps as operator arguments."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..mask.block_mask import MaskPart
from ..options import SCORE_OPTIONS, AttentionOptions
from .group import ContextGroup

_LISTS = tuple(name for name in AttentionOptions._fields if name.startswith("mask_"))[:7]


class RingOptions(NamedTuple):
    """Options of the ring's operators, in the order of their schema."""

    impl: str
    group: str  # name of the ContextGroup
    scores: Sequence[float]  # `SCORE_OPTIONS`
    mask_lists: Sequence[Any]  # tensors of all steps, as in `packed_masks`, or their shapes
    mask_sizes: Sequence[int]


class VisibleHalves(NamedTuple):
    """Halves of this rank's queries, and halves of one rank's keys that they see (causal mask)."""

    rows: tuple[int, ...]  # halves of the queries
    keys: tuple[int, ...]  # halves of the keys
    source: int  # rank of the keys
    causal: bool

    def chunks(self, group: ContextGroup) -> MaskPart:
        """Chunk numbers of the queries, and of the keys."""
        key_chunks = (self.source, 2 * group.size - 1 - self.source)
        return tuple(group.chunks[i] for i in self.rows), tuple(key_chunks[i] for i in self.keys)


def visible_halves(group: ContextGroup) -> list[VisibleHalves]:
    """Visible halves at each of the P steps of this rank, in order."""
    rank, steps = group.rank, []
    # Earlier ranks hold an early chunk that all queries see and a late one that none sees. Of later
    # ranks, only the second half of the queries sees keys: both chunks.
    for source in ((rank - i) % group.size for i in range(group.size)):
        rows = (1,) if source > rank else (0, 1)
        keys = (0,) if source < rank else (0, 1)
        steps.append(VisibleHalves(rows, keys, source, causal=source == rank))
    return steps


def halves(numbers: tuple[int, ...], c: int) -> slice:
    """Slice of the tokens of these halves, c tokens each."""
    return slice(numbers[0] * c, (numbers[-1] + 1) * c)


class Step(NamedTuple):
    """One step of the ring: attention of this rank to the keys of one rank."""

    rows: slice  # of this rank's queries
    keys: slice  # of the keys that this rank holds at the step
    options: AttentionOptions | None  # None: no query sees any of these keys


def steps_of(
    group: ContextGroup, c: int, doc_start: Tensor | None, options: RingOptions
) -> Iterator[Step]:
    """Yield the P steps of this rank, in order; doc_start (B, t) has positions in the sequence."""
    masks = masks_of(options.mask_lists, options.mask_sizes, group.size)
    for visible, mask in zip(visible_halves(group), masks, strict=True):
        rows, keys = halves(visible.rows, c), halves(visible.keys, c)
        if mask is None:
            yield Step(rows, keys, None)
            continue
        first_key = None
        if doc_start is not None:
            chunk_starts = [chunk * c for chunk in visible.chunks(group)[1]]
            first_key = _keys_before(doc_start[:, rows], chunk_starts, c)
        scores = dict(zip(SCORE_OPTIONS, options.scores, strict=True))
        attention = AttentionOptions(doc_start=first_key, causal=visible.causal, **scores, **mask)
        yield Step(rows, keys, attention)


def packed_masks(masks: Sequence[AttentionOptions | None]) -> tuple[list[Tensor], list[int]]:
    """Pack the masks of all steps into mask_lists and mask_sizes, four numbers for each step.

    Options without lists describe a step without a mask; None is a step that sees nothing.
    """
    # Operators take flat lists of tensors and ints, without None: -1 lists mark an empty step.
    lists: list[Tensor] = []
    sizes: list[int] = []
    for options in masks:
        if options is None:
            sizes += [-1, 0, 0, 0]
            continue
        present = [x for name in _LISTS if (x := getattr(options, name)) is not None]
        lists += present
        sizes += [len(present), options.mask_block_size, options.mask_packed, options.mask_loops]
    return lists, [int(n) for n in sizes]


def masks_of(
    lists: Sequence[Any], sizes: Sequence[int], n_steps: int
) -> list[dict[str, Any] | None]:
    """Unpack `packed_masks`, as fields of each step's AttentionOptions."""
    if not sizes:
        return [{} for _ in range(n_steps)]
    rest = iter(lists)
    masks: list[dict[str, Any] | None] = []
    for i in range(0, len(sizes), 4):
        n, block_size, packed, loops = sizes[i : i + 4]
        numbers = {"mask_block_size": block_size, "mask_packed": bool(packed), "mask_loops": loops}
        fields = dict(zip(_LISTS, islice(rest, max(n, 0)), strict=False))
        masks.append(None if n < 0 else fields | numbers)
    return masks


def _keys_before(doc_start: Tensor, chunk_starts: list[int], c: int) -> Tensor:
    """Number of keys in these chunks before each query's document: (B, rows) int32.

    The chunks are in the order of the sequence, so this is the index of the document's first key.
    """
    first, *others = ((doc_start - start).clamp_(0, c) for start in chunk_starts)
    for n in others:
        first += n
    return first.to(torch.int32).contiguous()
