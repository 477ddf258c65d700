"""How sure an accuracy is."""

import math
from statistics import NormalDist


def wilson(share: float, n: int) -> tuple[float, float]:
    """The 95% interval of a probability of which n draws gave `share`.

    Wilson 1927, J. Am. Stat. Assoc. 22; it stays within 0 and 1.
    """
    z = NormalDist().inv_cdf(0.975)
    shrunk = 1 + z**2 / n
    middle = (share + z**2 / (2 * n)) / shrunk
    half = z / shrunk * math.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    return middle - half, middle + half
