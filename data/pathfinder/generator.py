"""Generate Pathfinder images by number, as display lists."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from data.pathfinder.parameters import Pathfinder, display_list_dtype
from data.pathfinder.tables import build_tables

_CHUNKS_PER_THREAD = 8


def generate(
    parameters: Pathfinder,
    seed: int,
    numbers: Sequence[int] | npt.NDArray[np.integer],
    *,
    n_threads: int | None = None,
) -> np.ndarray:
    """Generate images, (len(numbers),) of `display_list_dtype(parameters)`.

    An image is a pure function of the parameters, the seed and its number.

    Args:
        seed: 0 to 2^64 - 1.
        numbers: Non-negative integers in any order.
        n_threads: Number of threads; None uses one per core.

    Raises:
        ValueError: An argument is out of range.
    """
    # load the compiled code only when images are generated, not when they are only read
    from data.pathfinder.contours import draw_images

    if not 0 <= seed < 1 << 64:
        raise ValueError(f"seed={seed} must be between 0 and 2^64 - 1.")
    if n_threads is not None and n_threads < 1:
        raise ValueError(f"n_threads={n_threads} must be at least 1, or None for all cores.")
    indices = np.asarray(numbers, dtype=np.int64)
    if indices.ndim != 1:
        raise ValueError(f"numbers has shape {indices.shape}, but must be a list of image numbers.")
    if indices.size and indices.min() < 0:
        raise ValueError(f"numbers must not be negative, but one is {indices.min()}.")
    tables = build_tables(parameters)

    def make(part: npt.NDArray[np.int64]) -> np.ndarray:
        strokes = np.empty((len(part), parameters.max_strokes, 3), np.int64)
        markers = np.empty((len(part), 2, 2), np.int64)
        counts = np.empty((len(part), 4), np.int64)
        draw_images(tables, np.uint64(seed), part.astype(np.uint64), strokes, markers, counts)
        lists = np.empty(len(part), display_list_dtype(parameters))
        for column, name in enumerate(("template", "y", "x")):
            lists["strokes"][name] = strokes[:, :, column]
        for column, name in enumerate(("n_strokes", "label", "margin", "restarts")):
            lists[name] = counts[:, column]
        lists["markers"] = markers
        return lists

    n_threads = n_threads or os.cpu_count() or 1
    n_parts = max(1, min(len(indices), n_threads * _CHUNKS_PER_THREAD))
    with ThreadPoolExecutor(n_threads) as pool:
        return np.concatenate(list(pool.map(make, np.array_split(indices, n_parts))))
