"""Constants of YaRN (Peng et al. 2023, arXiv 2309.00071). Importing it does not load PyTorch."""

import math

FAST_TURNS, SLOW_TURNS = 32, 1
"""Pairs with more turns in the trained context keep their frequency; with fewer, it is divided."""


def yarn_magnitude(factor: float) -> float:
    """Factor of queries and keys, which sharpens attention over the longer context."""
    return 0.1 * math.log(factor) + 1.0
