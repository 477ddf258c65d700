"""Chance that can be had again: numbers that look random and are a pure function of their keys."""

import torch
from torch import Tensor


def fixed_chance(keys: Tensor, n: int) -> Tensor:
    """Uniform numbers, the same for the same key and place.

    Nothing waits for the device, so that it may be captured in a graph.

    Args:
        keys: (R,) int64, at least 0.
        n: numbers of each.

    Returns:
        (R, n) float32 in [0, 1).
    """
    columns = torch.arange(n, device=keys.device)
    mixed = _mix(_mix(keys + 1)[:, None] + columns)
    return (mixed >> 40 & 0xFFFFFF).float() / 2**24  # as many bits as float32 has room for


def _mix(x: Tensor) -> Tensor:
    """The finalizer of splitmix64 (Stafford's variant 13) on int64, whose products wrap around."""
    x = (x ^ _shifted(x, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ _shifted(x, 27)) * (0x94D049BB133111EB - 2**64)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """To the right, with zeros from the left: torch's own shift repeats the sign."""
    return x >> bits & (1 << 64 - bits) - 1
