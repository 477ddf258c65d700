"""Masks of both passes, as plain Python: they hide what the reference hides."""

import random
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("triton")

from kernels.hopper import call as calls
from kernels.hopper import gluon
from kernels.hopper.backward import mma
from kernels.hopper.backward.plan import BLOCK, KEYS, QUERIES
from kernels.hopper.forward import softmax
from kernels.options import Features
from kernels.triton import block_ranges
from tests.kernels.hopper.in_python import GL, Number, Pointer, random_call, visible_pairs

IN_PYTHON = SimpleNamespace(
    **vars(GL), expand_dims=np.expand_dims, SliceLayout=lambda dim, parent: None
)


class Scores(np.ndarray):
    """Scores, which both passes mask, with the attribute that they read."""

    type = SimpleNamespace(layout=None)


def scores(rows, columns):
    return np.zeros((rows, columns)).view(Scores)


@pytest.fixture(autouse=True)
def in_python(monkeypatch):
    """The functions that mask scores, as plain Python."""
    for module in (gluon, calls, mma, softmax):
        monkeypatch.setattr(module, "gl", IN_PYTHON)
    monkeypatch.setattr(block_ranges, "tl", IN_PYTHON)
    monkeypatch.setattr(gluon, "LANE", gluon.LANE.value)
    monkeypatch.setattr(mma, "BEYOND", mma.BEYOND.value)
    monkeypatch.setattr(mma, "GROUP_N", KEYS)
    monkeypatch.setattr(mma, "M", QUERIES)
    for module in (gluon, mma):
        monkeypatch.setattr(module, "opaque", lambda x: x)
    for module in (mma, softmax):
        monkeypatch.setattr(module, "split_columns", gluon.split_columns.fn)
    for module, name in ((mma, "n_keys_of"), (mma, "doc_starts"), (softmax, "capped")):
        monkeypatch.setattr(module, name, getattr(module, name).fn)


@pytest.mark.parametrize("seed", range(20))
def test_backward_hides_what_no_query_sees(seed):
    draw = random.Random(seed)
    seq_q, seq_k, features, window_size, doc_start, lengths = random_call(draw)
    visible = visible_pairs(seq_q, seq_k, features, window_size, doc_start, lengths).numpy()
    call = SimpleNamespace(
        seq_q=seq_q, seq_k=seq_k, window_size=window_size,
        doc_ptr=Pointer(doc_start), lengths_ptr=Pointer(lengths),
    )  # fmt: skip
    plan = SimpleNamespace(features=features, ragged=seq_k % BLOCK != 0)
    for start_n in range(0, -(-seq_k // BLOCK) * BLOCK, KEYS):
        view = SimpleNamespace(start_n=start_n, batch=Number(0))
        for start_m in range(0, seq_q, QUERIES):
            masked = mma._masked_scores.fn(scores(KEYS, QUERIES), start_m, view, call, plan)
            expected = np.zeros((QUERIES, KEYS), bool)
            there = visible[start_m : start_m + QUERIES, start_n : start_n + KEYS]
            expected[: there.shape[0], : there.shape[1]] = there
            n_queries = min(QUERIES, seq_q - start_m)  # later ones are never stored
            assert np.array_equal(np.isfinite(masked).T[:n_queries], expected[:n_queries])


@pytest.mark.parametrize("n_keys", [64, 128])
@pytest.mark.parametrize("low", [False, True])
def test_forward_hides_what_is_outside_of_the_bounds_of_a_row(low, n_keys):
    numbers = np.random.default_rng(n_keys)
    start_n = 3 * n_keys
    lower, upper = np.sort(numbers.integers(-10, 6 * n_keys, (2, 64)), axis=0)
    rows = SimpleNamespace(lower=lower, upper=upper)
    plan = SimpleNamespace(features=Features(), low=low)
    masked = softmax.masked_scores.fn(scores(64, n_keys), start_n, None, rows, None, plan, True)
    key = start_n + np.arange(n_keys)
    expected = (key < upper[:, None]) & ((key >= lower[:, None]) | (not low))
    assert np.array_equal(np.isfinite(masked), expected)
    assert 0 < expected.mean() < 1
