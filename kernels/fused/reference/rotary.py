"""Rotary embeddings in PyTorch: the reference for the kernels.

Rotary embeddings make attention scores depend on distance alone: Su et al., "RoFormer: Enhanced
Transformer with Rotary Position Embedding" (arXiv 2104.09864). As in GPT-NeoX, dimension i is
paired with dimension i + D/2. Shapes: B batch, T tokens, H heads, D head_dim.
"""

import torch
from torch import Tensor


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x[..., i], x[..., i + D/2]) by the angles of their positions.

    The dot product of a rotated query and a rotated key depends only on the difference of their
    positions. Norms do not change.

    Args:
        x: (B, T, H, D) queries or keys, any floating dtype; computed in at least float32.
        cos, sin: (T, D/2), or (B, T, D/2) if each row has its own positions.

    Returns:
        (B, T, H, D) in the dtype of x.
    """
    cos, sin = cos[..., None, :], sin[..., None, :]  # (..., T, 1, D/2): the same for every head
    first, second = x.chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)
