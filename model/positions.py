"""Rotary position embedding: attention scores that depend on distance alone.

Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (arXiv 2104.09864), with
GPT-NeoX's pairing: dimension i turns together with dimension i + D/2.
Shapes: B batch, T tokens, H heads, D head_dim.
"""

import math
from typing import Any

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
        cos, sin: (T, D/2), or (B, T, D/2) where rows have positions of their own.

    Returns:
        (B, T, H, D) in the dtype of x.
    """
    cos, sin = cos[..., None, :], sin[..., None, :]  # (..., T, 1, D/2): the same for every head
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)


def axial_rotary_tables(
    rows: Tensor, columns: Tensor, head_dim: int, min_wavelength: float, max_wavelength: float
) -> tuple[Tensor, Tensor]:
    """Tables for `apply_rotary` by which scores depend on the difference in row and in column.

    The first half of the pairs turns by the row, the other by the column, both in pixels: what is
    learned of neighbours holds in a larger image, too. As in the vision transformers of Heo et al.
    2024, "Rotary Position Embedding for Vision Transformer" (arXiv 2403.13298), section 3.2.

    Args:
        rows, columns: (T,) integers, on the device where the tables are wanted.
        head_dim: D, a multiple of 4.
        min_wavelength, max_wavelength: pixels in which the fastest and the slowest pair turn once;
            between them geometric.

    Returns:
        cos, sin: each (T, D/2) float32.
    """
    share = torch.linspace(0, 1, head_dim // 4, device=rows.device, dtype=torch.float64)
    frequencies = 2 * math.pi / (min_wavelength * (max_wavelength / min_wavelength) ** share)
    angles = torch.cat((rows.double()[:, None], columns.double()[:, None]), dim=-1)
    angles = (angles[:, :, None] * frequencies).flatten(1)  # rows' pairs, then columns'
    return angles.cos().float(), angles.sin().float()


def sinusoids(positions: Tensor, width: int) -> Tensor:
    """Sines and cosines of a position, each in one half: Vaswani et al. 2017, section 3.5.

    Args:
        positions: (T,) numbers.
        width: C, even.

    Returns:
        (T, C) float32.
    """
    cos, sin = rotary_tables(positions, width, base=10_000.0)
    return torch.cat((sin, cos), dim=-1)


def row_and_column_waves(rows: Tensor, columns: Tensor, grid_width: int, n_waves: int) -> Tensor:
    """Sines and cosines of where in a square grid a pixel is: the same place in all sizes.

    Wave i (from 0) makes 2^i half turns from one edge to the other. The first tells one edge from
    the other, the later ones the fine position.

    Args:
        rows, columns: (T,) integers in [0, grid_width).
        grid_width: pixels in a row and in a column.
        n_waves: of each coordinate.

    Returns:
        (T, 4 n_waves) float32.
    """
    where = (torch.stack((rows, columns), dim=-1).double() + 0.5) / grid_width  # (T, 2), 0 to 1
    half_turns = 2.0 ** torch.arange(n_waves, device=rows.device, dtype=torch.float64)
    angles = (where[:, :, None] * half_turns * math.pi).flatten(1)
    return torch.cat((angles.sin(), angles.cos()), dim=-1).float()


def duplicate_gridwise(table: Tensor, grid_width: int) -> Tensor:
    """Learned positions of a square grid for a larger one: each is repeated over a square of it.

    As the FlashAttention paper goes on from Path-64 to Path-X (arXiv 2205.14135, appendix E.3).

    Args:
        table: (W * W, C), rows of the grid one after the other.
        grid_width: pixels in a row of the larger grid, a multiple of W.

    Returns:
        (grid_width * grid_width, C).

    Raises:
        ValueError: the table is not that of a square grid, or grid_width no multiple of its width.
    """
    width = math.isqrt(len(table))
    if width * width != len(table) or grid_width % width:
        raise ValueError(
            f"{len(table)} learned positions cannot be duplicated to a grid of {grid_width} x "
            f"{grid_width}: they must be those of a square grid whose width divides {grid_width}."
        )
    times = grid_width // width
    grid = table.view(width, width, -1)
    return grid.repeat_interleave(times, 0).repeat_interleave(times, 1).flatten(0, 1)


def rows_at(table: Tensor, places: Tensor) -> Tensor:
    """Rows of a learned table by their places: `table[places]`, with a faster gradient.

    That of `table[places]` adds up the rows of a batch at each place one by one.

    Args:
        table: (N, C).
        places: (T,), or (B, T), integers in [0, N). Of the tokens of a row at one place only the
            first may have a gradient: padding, which comes after them, has none.

    Returns:
        (T, C) or (B, T, C).
    """
    return table[places] if places.dim() == 1 else _RowsAt.apply(table, places)


class _RowsAt(torch.autograd.Function):
    """The gradient looks up which token stands at each place of each row, and adds up rows."""

    @staticmethod
    def forward(table: Tensor, places: Tensor) -> Tensor:
        return table[places]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        table, places = inputs
        ctx.save_for_backward(places)
        ctx.n_places = len(table)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        (places,), (grad,) = ctx.saved_tensors, grad_outputs
        B, T = places.shape
        every = torch.arange(ctx.n_places, dtype=places.dtype, device=places.device)
        every = every.expand(B, ctx.n_places).contiguous()
        ordered, tokens = places.sort(dim=1, stable=True)
        found = torch.searchsorted(ordered, every).clamp_(max=T - 1)
        stands = ordered.gather(1, found) == every
        token = tokens.gather(1, found)[..., None].expand(B, ctx.n_places, grad.shape[-1])
        return torch.where(stands[..., None], grad.gather(1, token), 0).sum(0), None
