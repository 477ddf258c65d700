"""Kernel arguments for a tensor: a TMA descriptor if possible, otherwise a pointer and strides.

The copy engine of Hopper and later (TMA) loads a tile with one instruction and no registers for
addresses. The forward pass at head dimension 128 is short of registers.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from . import is_interpreted

# Elements of q times keys. Descriptors save GPU time but cost CPU time, and smaller calls are
# limited by the CPU already.
MIN_TMA_WORK = 2**32


def worth_describing(q: Tensor, k: Tensor) -> bool:
    """Whether attention of q (B, T_q, H, D) and k (B, T_k, H_kv, D) is at least MIN_TMA_WORK."""
    return q.numel() * k.shape[1] >= MIN_TMA_WORK


def operand(x: Tensor, rows: int, block_d: int, described: bool) -> Any:
    """Kernel argument for x, as `kernels.triton.primitives.load_tile` and `store_tile` take it.

    Args:
        x: (B, T, H, D), last dimension contiguous.
        rows, block_d: of a tile; its columns are D rounded up to a power of two.
        described: `worth_describing` of the call.

    Returns:
        A descriptor of x as (B, H, T, D) with tiles (1, 1, rows, block_d), or the tuple
        (x, stride of B, stride of T, stride of H).
    """
    batch, seq_len, n_head, head_dim = x.shape
    stride_b, stride_t, stride_h, _ = x.stride()
    if not (described and _describable(x)):
        return x, stride_b, stride_t, stride_h
    return TensorDescriptor(
        x, shape=[batch, n_head, seq_len, head_dim], strides=[stride_b, stride_h, stride_t, 1],
        block_shape=[1, 1, rows, block_d],
    )  # fmt: skip


def _describable(x: Tensor) -> bool:
    """Whether TMA can address x: 16-byte aligned, with strides that are multiples of 16 bytes.

    fp32 keeps pointers: its tiles are small, and its speed is not a goal.
    """
    if x.element_size() != 2 or x.data_ptr() % 16 != 0:
        return False
    if any(stride <= 0 or stride * 2 % 16 != 0 for stride in x.stride()[:3]):
        return False
    return is_interpreted() or _has_copy_engine(x.device)


@functools.cache  # called a dozen times per attention call
def _has_copy_engine(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= 9
