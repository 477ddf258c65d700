"""Numbers that look random and are pure functions of their keys: resuming and threads change none.

The mixing of 64 bits stands here twice, for the two kinds of integers that there are. Compiled
code takes the first: `numba.njit(mix)`.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def key_stream(key: Sequence[int], n: int) -> npt.NDArray[np.uint64]:
    """`n` well-mixed words from a key of non-negative integers."""
    # NumPy promises that SeedSequence never changes
    return np.random.SeedSequence(key).generate_state(n, np.uint64).astype(np.uint64)


def mix(x):
    """The finalizer of splitmix64 (Stafford's variant 13), a strong mixing of 64 bits.

    It takes np.uint64, one or an array, and is not annotated, as numba compiles it, too.
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def mix_tensor(x: Tensor) -> Tensor:
    """`mix` of the bits of an int64 tensor of any shape; torch's products wrap around."""
    x = (x ^ _shifted(x, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ _shifted(x, 27)) * (0x94D049BB133111EB - 2**64)
    return x ^ _shifted(x, 31)


def fixed_chance(keys: Tensor, n: int) -> Tensor:
    """Uniform numbers in [0, 1), equal for equal keys.

    From keys of at least 0, int64 (R,), come float32 (R, n). Nothing waits for the device, so that
    it may be captured in a graph.
    """
    columns = torch.arange(n, device=keys.device)
    mixed = mix_tensor(mix_tensor(keys + 1)[:, None] + columns)
    return (mixed >> 40 & 0xFFFFFF).float() / 2**24  # as many bits as float32 has room for


def _shifted(x: Tensor, bits: int) -> Tensor:
    """To the right, with zeros from the left: torch's own shift repeats the sign."""
    return x >> bits & (1 << 64 - bits) - 1
