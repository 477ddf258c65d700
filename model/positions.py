"""Position embeddings: rotary, sinusoidal, and features of rows and columns.

Shapes: B batch, T tokens, D head_dim.
"""

import math
from typing import Any

import torch
from torch import Tensor


def rotary_frequencies(head_dim: int, base: float, device: torch.device | None = None) -> Tensor:
    """Radians per token by which each pair rotates, (D/2,) float64: `base ** (-2 i / D)`."""
    pairs = torch.arange(0, head_dim, 2, device=device, dtype=torch.float64)
    return base ** (-pairs / head_dim)


def rotary_tables(positions: Tensor, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """Compute the cosines and sines of the angles by which `rotary_qkv` rotates each position.

    Args:
        positions: (T,) numbers, on the device of the tables.
        head_dim: D, even.
        base: pair i rotates by `base ** (-2 i / D)` radians per token.

    Returns:
        cos, sin: each (T, D/2) float32.
    """
    return cos_and_sin(positions, rotary_frequencies(head_dim, base, positions.device))


def cos_and_sin(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions (T,) times frequencies (D/2,) float64: (T, D/2) float32."""
    # float64, because a float32 angle of 10^6 radians is off by 0.03. The tables may be float32.
    angles = positions.double()[:, None] * frequencies
    return angles.cos().float(), angles.sin().float()


def axial_rotary_tables(
    rows: Tensor, columns: Tensor, head_dim: int, min_wavelength: float, max_wavelength: float
) -> tuple[Tensor, Tensor]:
    """Build tables for `rotary_qkv` by row and column, so scores depend on their differences.

    The first half of the pairs rotates by the row, the second half by the column. Both count
    pixels, so what is learned about neighbours also holds in a larger image. See Heo et al. 2024,
    "Rotary Position Embedding for Vision Transformer" (arXiv 2403.13298), section 3.2.

    Args:
        rows, columns: (T,) integers, on the device of the tables.
        head_dim: D, a multiple of 4.
        min_wavelength, max_wavelength: periods of the fastest and the slowest pair, in pixels. The
            other periods are spaced geometrically between them.

    Returns:
        cos, sin: each (T, D/2) float32.
    """
    exponents = torch.linspace(0, 1, head_dim // 4, device=rows.device, dtype=torch.float64)
    frequencies = 2 * math.pi / (min_wavelength * (max_wavelength / min_wavelength) ** exponents)
    positions = torch.cat((rows.double()[:, None], columns.double()[:, None]), dim=-1)
    angles = (positions[:, :, None] * frequencies).flatten(1)  # pairs of rows, then of columns
    return angles.cos().float(), angles.sin().float()


def sinusoids(positions: Tensor, width: int) -> Tensor:
    """Sinusoidal position embeddings, first sines, then cosines (Vaswani et al. 2017, section 3.5).

    Args:
        positions: (T,) numbers.
        width: C, even.

    Returns:
        (T, C) float32.
    """
    cos, sin = rotary_tables(positions, width, base=10_000.0)
    return torch.cat((sin, cos), dim=-1)


def row_and_column_waves(rows: Tensor, columns: Tensor, grid_width: int, n_waves: int) -> Tensor:
    """Sines and cosines of a pixel's relative position in a square grid, whatever the grid's size.

    Wave i (from 0) makes 2^i half turns from one edge to the other. The first wave distinguishes
    the edges; later ones resolve finer positions.

    Args:
        rows, columns: (T,) integers in [0, grid_width).
        grid_width: pixels in a row and in a column.
        n_waves: waves per coordinate.

    Returns:
        (T, 4 n_waves) float32.
    """
    # (T, 2), each between 0 and 1
    positions = (torch.stack((rows, columns), dim=-1).double() + 0.5) / grid_width
    half_turns = 2.0 ** torch.arange(n_waves, device=rows.device, dtype=torch.float64)
    angles = (positions[:, :, None] * half_turns * math.pi).flatten(1)
    return torch.cat((angles.sin(), angles.cos()), dim=-1).float()


def duplicate_gridwise(table: Tensor, grid_width: int) -> Tensor:
    """Extend learned positions of a square grid to a larger one, repeating each over a square.

    The FlashAttention paper extends Path-64 to Path-X this way (arXiv 2205.14135, appendix E.3).

    Args:
        table: (W * W, C), positions in row-major order.
        grid_width: width of the larger grid in pixels, a multiple of W.

    Returns:
        (grid_width * grid_width, C).

    Raises:
        ValueError: the table is not that of a square grid, or grid_width is not a multiple of W.
    """
    width = math.isqrt(len(table))
    if width * width != len(table) or grid_width % width:
        raise ValueError(
            f"{len(table)} learned positions cannot be extended to a grid of {grid_width} x "
            f"{grid_width}: they must be those of a square grid whose width divides {grid_width}."
        )
    factor = grid_width // width
    grid = table.view(width, width, -1)
    return grid.repeat_interleave(factor, 0).repeat_interleave(factor, 1).flatten(0, 1)


def gather_rows(table: Tensor, positions: Tensor) -> Tensor:
    """Look up rows of a learned table: `table[positions]` with a faster backward pass.

    The backward pass of `table[positions]` adds the gradients of a batch to each row one by one.

    Args:
        table: (N, C).
        positions: (T,), or (B, T), integers in [0, N). If several tokens of a row share a position,
            only the first of them may have a gradient. Padding comes last and has none.

    Returns:
        (T, C) or (B, T, C).
    """
    return table[positions] if positions.dim() == 1 else _GatherRows.apply(table, positions)


class _GatherRows(torch.autograd.Function):
    """Lookup whose backward pass finds the token at each position, then sums over the batch."""

    @staticmethod
    def forward(table: Tensor, positions: Tensor) -> Tensor:
        return table[positions]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        table, positions = inputs
        ctx.save_for_backward(positions)
        ctx.n_rows = len(table)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        (positions,), (grad,) = ctx.saved_tensors, grad_outputs
        B, T = positions.shape
        # For each position, the index of its first token in each row, and whether there is one.
        rows = torch.arange(ctx.n_rows, dtype=positions.dtype, device=positions.device)
        rows = rows.expand(B, ctx.n_rows).contiguous()
        sorted_positions, tokens = positions.sort(dim=1, stable=True)
        index = torch.searchsorted(sorted_positions, rows).clamp_(max=T - 1)
        is_used = sorted_positions.gather(1, index) == rows
        token = tokens.gather(1, index)[..., None].expand(B, ctx.n_rows, grad.shape[-1])
        return torch.where(is_used[..., None], grad.gather(1, token), 0).sum(0), None
