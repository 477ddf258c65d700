"""Random numbers for code compiled by Numba.

The generator is splitmix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number
Generators", 2014). A stream is an array of two np.uint64: the state, a counter whose mixed value is
the random number, and the odd increment.
"""

import numpy as np
from numba import njit

from data.randomness import mix

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
mix64 = njit(mix)


@njit
def _next(stream):
    stream[0] += stream[1]
    return mix64(stream[0])


@njit
def below(stream, n):
    """Random int64 in [0, n), with a relative bias of at most n / 2^32."""
    return np.int64(((_next(stream) >> np.uint64(32)) * np.uint64(n)) >> np.uint64(32))


@njit
def uniform(stream):
    """Random float64 in [0, 1), with 53 random bits."""
    return np.float64(_next(stream) >> np.uint64(11)) * 2.0**-53
