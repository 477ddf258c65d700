"""CPU time of a call: the least of batches, the first of which compiles."""

import itertools
from functools import partial

import pytest
import torch

from experiments import timing
from experiments.attention import host
from experiments.attention.cases import Case, make_tensors


def test_the_least_batch_counts_but_for_the_first(monkeypatch):
    clock, called = itertools.count(), []
    # each batch takes longer than the one before it, between two looks at the clock
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock) ** 2 / 2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    times = host.host_us({name: partial(called.append, name) for name in "ab"}, 5)
    assert called == (["a"] * 5 + ["b"] * 5) * (host.BATCHES + 1)
    seconds = [((2 * i + 1) ** 2 - (2 * i) ** 2) / 2 for i in (2, 3)]
    assert times == {
        name: pytest.approx(1e6 * s / 5) for name, s in zip("ab", seconds, strict=True)
    }


def test_a_line_for_each_call():
    rows = [
        {"call": "causal", "name": "ours, launch", "forward_us": 9.2},
        {"call": "dropout", "name": "ours", "forward_us": 43.6, "both_us": 99.5, "in_row_us": 7.0},
    ]
    printed = host.host_table({"rows": rows}).splitlines()[2:]
    assert [[x.strip() for x in line.split("|")[1:-1]] for line in printed] == [
        ["causal", "Papilio, launch", "9", "", ""],
        ["dropout", "Papilio", "44", "100", "7"],
    ]


def test_both_passes_go_through_all_layers():
    tensors = make_tensors(Case(1, 8, 2, 4, dtype=torch.float32), "cpu")
    grads = host.both_passes(lambda q, k, v: q * k + v, tensors, 3)
    assert grads[0].allclose(tensors.dout * tensors.k**3)
