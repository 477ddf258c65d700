"""What the walks of the Hopper backward want to know of packed documents."""

import torch
from torch import Tensor

from .plan import BLOCK, KEYS


def document_bounds(doc_start: Tensor, seq_k: int) -> tuple[Tensor, Tensor]:
    """Bounds for `kernels.hopper.backward.tiles`, right for any doc_start, increasing or not.

    Args:
        doc_start: (B, T_q) int32, the first position of each query's document.

    Returns:
        (B, blocks) int32, for each block the least start of its queries and of those after it; and
        (B, key tiles, 3) int32: how many of these are at or before the tile's last key, and for
        each half of the tile how many queries come before the first whose document begins after
        its first key.
    """
    lowest_after = doc_start.flip(1).cummin(dim=1).values.flip(1)
    blocks = lowest_after[:, ::BLOCK].contiguous()
    batch, device = doc_start.shape[0], doc_start.device
    n_tiles = -(-seq_k // BLOCK)
    first_key = torch.arange(0, n_tiles * BLOCK, KEYS, dtype=torch.int32, device=device)
    first_key = first_key.expand(batch, -1)
    last_key = (first_key[:, ::2] + (BLOCK - 1)).contiguous()
    visited = torch.searchsorted(blocks, last_key, right=True)
    highest_before = doc_start.cummax(dim=1).values
    whole = torch.searchsorted(highest_before, first_key.contiguous(), right=True)
    tiles = torch.cat((visited[..., None], whole.view(batch, n_tiles, 2)), dim=-1)
    return blocks, tiles.to(torch.int32)
