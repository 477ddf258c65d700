"""The kernels for Hopper, H100 and H200, in Gluon.

Importing this needs neither a GPU nor Triton; fwd.py is imported by the first call.
"""

import torch

from kernels import triton
from kernels.call import AttentionCall

_SERVED = frozenset(
    {
        "causal", "window_size", "mask", "doc_start", "kv_lengths", "sinks", "softcap", "dropout_p",
        "dropout_seed",
    }
)  # fmt: skip


def obstacle(call: AttentionCall) -> str | None:
    """Why these kernels cannot serve the call, None if they can. torch.compile can trace it."""
    q = call.q
    if not _is_hopper(q.device):
        return f"q is on {q.device}, and it needs an H100 or H200"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bf16 and fp16, and q is {q.dtype}"
    if q.shape[-1] % 8 != 0:
        return f"it takes multiples of 8 as head_dim, and q has {q.shape[-1]}"
    for name, tensor in (("q", q), ("k", call.k), ("v", call.v)):
        if not describable(tensor.shape, tensor.stride()):
            return (
                "the copy engine takes strides that are multiples of 16 bytes, and "
                f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}: call "
                ".contiguous() on it"
            )
    mask = call.arguments.get("mask")
    least = 64 if q.shape[-1] <= 128 else 128  # queries of a row tile; smaller blocks waste most
    if mask is not None and mask.block_size < least:
        return (
            f"at head_dim {q.shape[-1]} it takes masks in blocks of {least} or more, and mask has "
            f"blocks of {mask.block_size}"
        )
    # what the backward pass here does not serve goes to the portable one
    return call.lacks(_SERVED) or triton.obstacle(call)


def describable(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether the copy engine can stride through a (B, T, H, D) tensor of 2 bytes an element."""
    return all(
        size == 1 or (stride > 0 and stride % 8 == 0)
        for size, stride in zip(shape[:3], strides[:3], strict=True)
    )


def _is_hopper(device: torch.device) -> bool:
    # of what tells, this is what torch.compile can trace
    return device.type == "cuda" and torch.cuda.get_device_properties(device).major == 9
