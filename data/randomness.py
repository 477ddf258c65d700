"""Pseudorandom numbers as pure functions of their keys, independent of resuming and of threads.

The 64-bit mixing function is written twice: `mix` for NumPy integers and `mix_tensor` for torch's.
Compiled code uses the first, as `numba.njit(mix)`.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def key_stream(key: Sequence[int], n: int) -> npt.NDArray[np.uint64]:
    """Derive `n` well-mixed 64-bit words from a key of non-negative integers."""
    # NumPy guarantees that the output of SeedSequence never changes
    return np.random.SeedSequence(key).generate_state(n, np.uint64).astype(np.uint64)


def mix(x):
    """Mix 64 bits strongly: the finalizer of splitmix64 (Stafford's variant 13).

    Takes one np.uint64 or an array of them. It has no annotations because Numba also compiles it.
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def mix_tensor(x: Tensor) -> Tensor:
    """Apply `mix` to the bits of an int64 tensor of any shape; torch's products wrap around."""
    x = (x ^ _shifted(x, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ _shifted(x, 27)) * (0x94D049BB133111EB - 2**64)
    return x ^ _shifted(x, 31)


def fixed_chance(keys: Tensor, n: int) -> Tensor:
    """Draw n uniform numbers in [0, 1) per key; equal keys give equal numbers.

    Non-negative keys, int64 (R,), give float32 (R, n). There is no device synchronization, so the
    call can be captured in a CUDA graph.
    """
    columns = torch.arange(n, device=keys.device)
    mixed = mix_tensor(mix_tensor(keys + 1)[:, None] + columns)
    return (mixed >> 40 & 0xFFFFFF).float() / 2**24  # 24 bits, the precision of float32


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's own shift is arithmetic and repeats the sign bit."""
    return x >> bits & (1 << 64 - bits) - 1
