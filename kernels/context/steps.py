"""What a process does at each step of the ring, and how operators are told of the masks of it."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..mask.block_mask import MaskPart
from ..options import AttentionOptions
from .group import ContextGroup

_LISTS = tuple(name for name in AttentionOptions._fields if name.startswith("mask_"))[:7]


class Meeting(NamedTuple):
    """What the queries of a process and the keys of one rank have to do with each other."""

    rows: tuple[int, ...]  # which halves of its queries
    keys: tuple[int, ...]  # which halves of those that came
    source: int  # whose they are
    causal: bool

    def chunks(self, group: ContextGroup) -> MaskPart:
        """Numbers of the chunks of these queries, and of these keys."""
        of_source = (self.source, 2 * group.size - 1 - self.source)
        return tuple(group.chunks[i] for i in self.rows), tuple(of_source[i] for i in self.keys)


def meetings(group: ContextGroup) -> list[Meeting]:
    """Those of the P steps of a process, in their order."""
    found = []
    for i in range(group.size):
        source = (group.rank - i) % group.size
        rows = (1,) if source > group.rank else (0, 1)
        keys = (0,) if source < group.rank else (0, 1)
        found.append(Meeting(rows, keys, source, causal=i == 0))
    return found


def halves(which: tuple[int, ...], c: int) -> slice:
    """The tokens of these halves."""
    return slice(which[0] * c, (which[-1] + 1) * c)


class Step(NamedTuple):
    """What a process does with the keys of one rank."""

    rows: slice  # of its queries
    keys: slice  # of those that came
    options: AttentionOptions | None  # None: no query sees any of these keys


def steps_of(
    group: ContextGroup,
    c: int,
    doc_start: Tensor | None,
    softmax_scale: float,
    softcap: float,
    mask_lists: Sequence[Tensor],
    mask_sizes: Sequence[int],
) -> Iterator[Step]:
    """The P steps of this process, in their order; doc_start (B, t) are positions of T."""
    masks = masks_of(mask_lists, mask_sizes, group.size)
    for meeting, mask in zip(meetings(group), masks, strict=True):
        rows, keys = halves(meeting.rows, c), halves(meeting.keys, c)
        if mask is None:
            yield Step(rows, keys, None)
            continue
        _, chunks = meeting.chunks(group)
        options = AttentionOptions(
            doc_start=None
            if doc_start is None
            else _keys_before(doc_start[:, rows], [chunk * c for chunk in chunks], c),
            softmax_scale=softmax_scale,
            softcap=softcap,
            causal=meeting.causal,
        )
        yield Step(rows, keys, options._replace(**mask))


def packed_masks(masks: Sequence[AttentionOptions | None]) -> tuple[list[Tensor], list[int]]:
    """The masks of all steps as the operators take them: mask_lists and mask_sizes.

    Of a step without a mask the options have none; None is one that sees nothing.
    """
    lists: list[Tensor] = []
    sizes: list[int] = []
    for options in masks:
        if options is None:
            sizes += [-1, 0, 0, 0]
            continue
        present = [x for x in (getattr(options, name) for name in _LISTS) if x is not None]
        lists += present
        sizes += [len(present), options.mask_block_size, options.mask_packed, options.mask_loops]
    return lists, [int(n) for n in sizes]


def masks_of(
    lists: Sequence[Any], sizes: Sequence[int], n_steps: int
) -> list[dict[str, Any] | None]:
    """What `packed_masks` packed, as fields of the options of each step."""
    if not sizes:
        return [{} for _ in range(n_steps)]
    rest = iter(lists)
    found: list[dict[str, Any] | None] = []
    for at in range(0, len(sizes), 4):
        n, block_size, packed, loops = sizes[at : at + 4]
        if n < 0:
            found.append(None)
            continue
        fields = dict(zip(_LISTS, islice(rest, n), strict=False))
        numbers = {"mask_block_size": block_size, "mask_packed": bool(packed)}
        found.append({**fields, **numbers, "mask_loops": loops})
    return found


def _keys_before(doc_start: Tensor, chunk_starts: list[int], c: int) -> Tensor:
    """How many keys of these chunks come before the document of each query: (B, rows) int32.

    The keys stand in the order of the sequence, so it is where the document begins among them.
    """
    first, *others = ((doc_start - start).clamp_(0, c) for start in chunk_starts)
    for n in others:
        first += n
    return first.to(torch.int32).contiguous()
