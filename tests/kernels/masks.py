"""Random block masks, and the definition of a block mask element by element."""

import math

import torch
from torch import Tensor

from kernels.mask.block_mask import BlockSparseMask
from kernels.mask.lists import MaskLists


def elements(
    mask: BlockSparseMask, seq_q: int, seq_k: int, causal: bool, window_size: int | None
) -> Tensor:
    """(H_m, seq_q, seq_k) bool: the visible pairs of a mask by its definition."""
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


def kinds_of(entries: list, blocks: list) -> dict[tuple[int, int, int], str]:
    """Map (head, number of the entry, listed block) to the kind of the block."""
    kinds = {}
    for head, head_entries in enumerate(entries):
        for number, begin, full, partial, *_ in head_entries:
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
