"""Rotary position embedding: attention scores that depend on distance alone.

Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (arXiv 2104.09864), with
GPT-NeoX's pairing: dimension i turns together with dimension i + D/2.
Shapes: B batch, T tokens, H heads, D head_dim.
"""

import torch
from torch import Tensor


def rotary_tables(
    positions: Tensor, head_dim: int, base: float, scaling: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the angles by which `apply_rotary` turns each position.

    Args:
        positions: (T,) integers, on the device where the tables are wanted.
        head_dim: D, even.
        base: pair i turns by `base ** (-2 i / D)` radians a token.
        scaling: divides the positions. A model trained on L tokens meets no angle that it has not
            seen on `scaling * L` (position interpolation, Chen et al. 2023, arXiv 2306.15595).

    Returns:
        cos, sin: each (T, D/2) float32.
    """
    pairs = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float64)
    frequencies = base ** (-pairs / head_dim)
    # float64, because a float32 angle of 10^6 radians is off by 0.03; the table itself can round.
    angles = positions.double()[:, None] / scaling * frequencies
    return angles.cos().float(), angles.sin().float()


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (x[..., i], x[..., i + D/2]) by the angles of their positions.

    The dot product of a query and a key turned this way depends on their positions only through
    the difference, and lengths stay as they were.

    Args:
        x: (B, T, H, D) queries or keys, any floating dtype; computed in at least float32.
        cos, sin: (T, D/2) from `rotary_tables`.

    Returns:
        (B, T, H, D) in the dtype of x.
    """
    cos, sin = cos[:, None, :], sin[:, None, :]  # (T, 1, D/2): the same for every head
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)
