"""Compiled generator of the random ListOps formulas of data/lra/listops.py.

Candidate i is a pure function of (seed, i), so the result does not depend on the number of threads.
"""

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count, pairwise

import numpy as np
from numba import njit

from data.compiled_random import GOLDEN, below, mix64, uniform
from data.lra.listops import (
    CLOSE_ID,
    FIRST_OPERATOR_ID,
    LONGEST,
    MAX_ARGUMENTS,
    MAX_DEPTH,
    OPERATOR_PROBABILITY,
    OPERATORS,
    SHORTEST,
    Formula,
)

CHUNK = 4096  # candidates per work item; one in twelve has the benchmark's length

_N_OPERATORS = len(OPERATORS)
_MIN, _MAX, _MED = range(3)


def generate(
    seed: int, n_threads: int | None = None, *, shortest: int = SHORTEST, longest: int = LONGEST
) -> Iterator[Formula]:
    """Yield distinct formulas forever; the n-th is a pure function of seed, lengths and n.

    Few tokens allow only few distinct formulas.

    Args:
        seed: Non-negative.
        n_threads: Number of threads; all cores by default.
    """
    yielded = set()
    for formulas in candidates(seed, shortest, longest, n_threads):
        for tokens, value in formulas:
            key = tokens.tobytes()
            if key not in yielded:
                yielded.add(key)
                yield tokens, value


def candidates(
    seed: int, shortest: int, longest: int, n_threads: int | None = None
) -> Iterator[list[Formula]]:
    """Yield chunks of candidates of `shortest` to `longest` tokens, in numerical order."""
    if seed < 0:
        raise ValueError(f"seed={seed} must not be negative.")
    n_threads = n_threads or os.cpu_count() or 1
    key = np.random.SeedSequence(seed).generate_state(1, np.uint64)[0]
    with ThreadPoolExecutor(n_threads) as pool:
        queue = deque()
        try:
            for number in count():
                queue.append(pool.submit(chunk, key, number * CHUNK, CHUNK, shortest, longest))
                if len(queue) > n_threads:
                    yield queue.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def chunk(key: np.uint64, first: int, n: int, shortest: int, longest: int) -> list[Formula]:
    """Generate candidates `first` to `first + n - 1` and keep those of the right length."""
    tokens = np.empty(n * longest, np.uint8)
    offsets = np.zeros(n + 1, np.int64)
    values = np.empty(n, np.uint8)
    n_kept = _fill(key, np.uint64(first), n, shortest, longest, tokens, offsets, values)
    kept = tokens[: offsets[n_kept]].copy()
    spans = pairwise(offsets[: n_kept + 1].tolist())
    pairs = zip(spans, values[:n_kept].tolist(), strict=True)
    return [(kept[start:end], value) for (start, end), value in pairs]


@njit(nogil=True, cache=True)
def _fill(key, first, n, shortest, longest, tokens, offsets, values):
    """Write the kept candidates into the three arrays; returns their number."""
    stream = np.full(2, GOLDEN, np.uint64)
    levels = np.empty((MAX_DEPTH, 2 + MAX_ARGUMENTS), np.int64)
    n_kept = 0
    for i in range(n):
        stream[0] = mix64(key ^ mix64(first + np.uint64(i)))
        start = offsets[n_kept]
        length, value = _formula(stream, levels, tokens[start : start + longest])
        if length >= shortest:
            offsets[n_kept + 1] = start + length
            values[n_kept] = value
            n_kept += 1
    return n_kept


@njit(nogil=True, cache=True)
def _formula(stream, levels, tokens):
    """Write one formula; returns its length and value, or length 0 if it is too long.

    A row of `levels` is an open operator: its index, its final number of arguments, and the values
    of the arguments so far. `n_values` counts these.
    """
    n_values = np.zeros(MAX_DEPTH, np.int64)
    depth = 0
    length = 0
    while length < len(tokens):
        if depth + 1 < MAX_DEPTH and uniform(stream) <= OPERATOR_PROBABILITY:
            levels[depth, 0] = below(stream, _N_OPERATORS)
            levels[depth, 1] = 2 + below(stream, MAX_ARGUMENTS - 1)
            tokens[length] = FIRST_OPERATOR_ID + levels[depth, 0]
            n_values[depth] = 0
            length += 1
            depth += 1
            continue
        value = below(stream, 10)
        tokens[length] = value + 1
        length += 1
        while depth > 0:
            level = depth - 1
            levels[level, 2 + n_values[level]] = value
            n_values[level] += 1
            if n_values[level] < levels[level, 1]:
                break
            if length == len(tokens):
                return 0, 0
            value = _apply(levels[level, 0], levels[level, 2 : 2 + n_values[level]])
            tokens[length] = CLOSE_ID
            length += 1
            depth = level
        if depth == 0:
            return length, value
    return 0, 0


@njit(nogil=True, cache=True)
def _apply(operator, values):
    if operator == _MIN:
        return values.min()
    if operator == _MAX:
        return values.max()
    if operator == _MED:
        ordered = np.sort(values)
        n = len(ordered)
        return (ordered[(n - 1) // 2] + ordered[n // 2]) // 2
    return values.sum() % 10
