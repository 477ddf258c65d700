"""Random numbers in code that Numba compiles: splitmix64 (Steele, Lea and Flood, "Fast Splittable
Pseudorandom Number Generators", 2014).

A stream is an array of two np.uint64: its state, a counter that is mixed, and its odd increment.
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
    """An int64 in [0, n); no value is likelier than another by more than n / 2^32."""
    return np.int64(((_next(stream) >> np.uint64(32)) * np.uint64(n)) >> np.uint64(32))


@njit
def uniform(stream):
    """A float64 in [0, 1), of 53 bits."""
    return np.float64(_next(stream) >> np.uint64(11)) * 2.0**-53
