"""The kernels for Hopper, H100 and H200, in Gluon.

Importing this needs neither a GPU nor Triton; the kernels are imported by the first call.
"""

import torch
from torch import Tensor

from .. import triton
from ..mask.block_mask import BlockSparseMask
from ..mask.packing import MOST_PACKED, PACKED_BLOCK
from ..options import AttentionOptions

# By block size, how many blocks of a mask must lie in one of 64 for a block of 64 to take less time
# than they take the portable kernels, forward and backward, on an H100
_LEAST_FILL = {16: 3.0, 32: 1.75}


def unsupported_reason(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> str | None:
    """Reason why these kernels cannot serve the call, or None. torch.compile can trace it.

    They serve the options of the portable kernels, to which they leave some backward passes.
    """
    if not _is_hopper(q.device):
        return f"q is on {q.device}, and it needs an H100 or H200"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bf16 and fp16, and q is {q.dtype}"
    if q.shape[-1] % 8 != 0:
        return f"it takes multiples of 8 as head_dim, and q has {q.shape[-1]}"
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not describable(tensor.shape, tensor.stride()):
            return (
                "the copy engine takes strides that are multiples of 16 bytes, and "
                f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}: call "
                ".contiguous() on it"
            )
    mask = options.mask
    of_mask = None if mask is None else _unsupported_mask(mask, q.shape[-1])
    return of_mask or triton.unsupported_reason(q, k, v, options)


def unsupported_linear(x: Tensor, weight: Tensor) -> str | None:
    """Reason why the matrix product cannot serve x (..., C) and weight (F, C), or None."""
    if not _is_hopper(x.device):
        return f"x is on {x.device}, and it needs an H100 or H200"
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bf16 and fp16, and x is {x.dtype}"
    if x.numel() == 0 or x.shape[-1] % 8 != 0 or weight.shape[0] % 8 != 0:
        return (
            "it takes one row or more and widths that are multiples of 8, and x is "
            f"{tuple(x.shape)}, the first weight {tuple(weight.shape)}"
        )
    return triton.unsupported_device(x, "x")


def _unsupported_mask(mask: BlockSparseMask, head_dim: int) -> str | None:
    if head_dim > 128 and mask.block_size < 128:
        return (
            f"at head_dim {head_dim} it takes masks in blocks of 128 or more, and mask has blocks "
            f"of {mask.block_size}"
        )
    tokens = max(mask.layout.shape[1:]) * mask.block_size
    if mask.block_size < PACKED_BLOCK and tokens > MOST_PACKED * PACKED_BLOCK:
        return (
            f"it packs blocks of {mask.block_size} up to {MOST_PACKED * PACKED_BLOCK} tokens, and "
            f"mask is for {tokens}"
        )
    least = _LEAST_FILL.get(mask.block_size, 1.0)
    if mask.packed_fill < least:
        return (
            f"it packs blocks of {mask.block_size} into blocks of 64 if those that hold any hold "
            f"{least} or more on average, and those of mask hold {mask.packed_fill:.2f}"
        )
    return None


def describable(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether the copy engine can stride through a (B, T, H, D) tensor of 2 bytes an element."""
    return all(
        size == 1 or (stride > 0 and stride % 8 == 0)
        for size, stride in zip(shape[:3], strides[:3], strict=True)
    )


def _is_hopper(device: torch.device) -> bool:
    # of what tells, this is what torch.compile can trace
    return device.type == "cuda" and torch.cuda.get_device_properties(device).major == 9
