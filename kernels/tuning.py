"""Tile sizes by head dimension, dtype and GPU, and the other choices of a launch."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor


@dataclass(frozen=True)
class Tiles:
    """What one launch is compiled for: tile sizes in elements, warps a program, pipeline stages."""

    block_m: int
    block_n: int
    block_d: int
    num_warps: int
    num_stages: int


# (block_m, block_n, num_warps, num_stages) by padded head dimension. `hopper` was measured on an
# H100; `portable` fits the 99 KiB of shared memory that the smallest Ampere and Ada GPUs have.
_FORWARD = {
    "hopper": {16: (128, 64, 4, 3), 32: (128, 64, 4, 3), 64: (128, 64, 8, 3), 128: (128, 64, 8, 3)},
    "portable": {
        16: (128, 64, 4, 3),
        32: (128, 64, 4, 3),
        64: (128, 64, 4, 3),
        128: (64, 64, 4, 2),
    },
}
_BACKWARD_DKDV = {
    "hopper": {16: (32, 64, 4, 3), 32: (32, 64, 4, 3), 64: (128, 64, 4, 2), 128: (32, 128, 8, 3)},
    "portable": {16: (32, 64, 4, 2), 32: (32, 64, 4, 2), 64: (64, 32, 4, 2), 128: (32, 64, 8, 2)},
}
_BACKWARD_DQ = {
    "hopper": {16: (128, 64, 4, 3), 32: (128, 64, 4, 3), 64: (128, 64, 8, 3), 128: (128, 64, 8, 2)},
    "portable": {16: (64, 64, 4, 2), 32: (64, 64, 4, 2), 64: (64, 32, 4, 2), 128: (64, 32, 4, 2)},
}
# fp32 operands are twice as large and run without the 16-bit matrix units.
_FP32 = {16: (64, 32, 4, 2), 32: (64, 32, 4, 2), 64: (32, 32, 4, 2), 128: (32, 16, 4, 2)}


def forward_tiles(q: Tensor) -> Tiles:
    """Tiles of the forward kernel for q (B, T, H, D)."""
    return _tiles(_FORWARD, q)


def backward_dkdv_tiles(q: Tensor) -> Tiles:
    """Tiles of the kernel that owns block_n keys and walks over the queries."""
    return _tiles(_BACKWARD_DKDV, q)


def backward_dq_tiles(q: Tensor) -> Tiles:
    """Tiles of the kernel that owns block_m queries and walks over the keys."""
    return _tiles(_BACKWARD_DQ, q)


def _tiles(table: dict[str, dict[int, tuple[int, int, int, int]]], q: Tensor) -> Tiles:
    # Matrix units take no inner dimension below 16; other sizes are padded to a power of two.
    block_d = max(16, triton.next_power_of_2(q.shape[-1]))
    if q.dtype == torch.float32:
        row = _FP32[block_d]
    else:
        row = table["hopper" if _is_hopper(q) else "portable"][block_d]
    block_m, block_n, num_warps, num_stages = row
    return Tiles(block_m, block_n, block_d, num_warps, num_stages)


def _is_hopper(q: Tensor) -> bool:
    return q.is_cuda and torch.cuda.get_device_capability(q.device)[0] == 9


def dot_precision(dtype: torch.dtype) -> str:
    """How fp32 tiles are multiplied: as `torch.set_float32_matmul_precision` asks."""
    if dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest":
        return "ieee"
    return "tf32"


def dropout_threshold(dropout_p: float) -> int:
    """A probability is dropped where its 32 random bits are below this."""
    return int(dropout_p * 2**32)
