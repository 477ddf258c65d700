"""Attention and GEMM kernels for Hopper (H100, H200), in Gluon.

Importing this needs neither a GPU nor Triton; the first call imports the kernels.
"""

import torch
from torch import Tensor

from .. import triton
from ..mask.block_mask import BlockSparseMask
from ..mask.packing import MAX_PACKED, PACKED_BLOCK
from ..options import AttentionOptions

# By block size: how many blocks of a mask a block of 64 must hold on average, so that packing them
# is faster than the portable kernels, forward and backward, on an H100
_MIN_PACKED_FILL = {16: 3.0, 32: 1.75}


def unsupported_reason(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> str | None:
    """Reason why these kernels cannot serve the call, or None. torch.compile can trace it.

    They serve all options of the portable kernels, and use those for some backward passes.
    """
    if not _is_hopper(q.device):
        return f"q.device={q.device} must be an H100 or H200"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"q.dtype={q.dtype} must be torch.bfloat16 or torch.float16"
    if q.shape[-1] % 8 != 0:
        return f"head_dim={q.shape[-1]} must be a multiple of 8"
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not describable(tensor.shape, tensor.stride()):
            return (
                f"{name}.stride()={tensor.stride()}, for shape {tuple(tensor.shape)}, must be "
                f"positive multiples of 8 (16 bytes, for the copy engine). Try {name}.contiguous()"
            )
    mask = options.mask
    mask_reason = None if mask is None else _unsupported_mask(mask, q.shape[-1])
    return mask_reason or triton.unsupported_reason(q, k, v, options)


def unsupported_linear(x: Tensor, weight: Tensor) -> str | None:
    """Reason why the GEMM cannot serve x (..., C) and weight (F, C), or None."""
    if not _is_hopper(x.device):
        return f"x.device={x.device} must be an H100 or H200"
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"x.dtype={x.dtype} must be torch.bfloat16 or torch.float16"
    if x.numel() == 0 or x.shape[-1] % 8 != 0 or weight.shape[0] % 8 != 0:
        return (
            f"x.shape={tuple(x.shape)} must have at least one row, and its width and that of the "
            f"first weight, {tuple(weight.shape)}, must be multiples of 8"
        )
    return triton.unsupported_device(x, "x")


def _unsupported_mask(mask: BlockSparseMask, head_dim: int) -> str | None:
    """Reason why these kernels cannot serve this mask, or None."""
    if head_dim > 128 and mask.block_size < 128:
        return f"mask.block_size={mask.block_size} must be at least 128 with head_dim={head_dim}"
    tokens = max(mask.layout.shape[1:]) * mask.block_size
    if mask.block_size < PACKED_BLOCK and tokens > MAX_PACKED * PACKED_BLOCK:
        return (
            f"mask is for {tokens} tokens and must be for at most {MAX_PACKED * PACKED_BLOCK} "
            f"with block_size={mask.block_size}, as its blocks are packed into blocks of 64"
        )
    min_fill = _MIN_PACKED_FILL.get(mask.block_size, 1.0)
    if mask.packed_fill < min_fill:
        return (
            f"mask.packed_fill={mask.packed_fill:.2f} must be at least {min_fill} with block_size="
            f"{mask.block_size} (the average number of its blocks in a block of 64 that holds any)"
        )
    return None


def describable(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether the copy engine can take the strides of a (B, T, H, D) tensor of 2-byte elements."""
    return all(
        size == 1 or (stride > 0 and stride % 8 == 0)
        for size, stride in zip(shape[:3], strides[:3], strict=True)
    )


def _is_hopper(device: torch.device) -> bool:
    # torch.compile can trace this look-up of the compute capability.
    return device.type == "cuda" and torch.cuda.get_device_properties(device).major == 9
