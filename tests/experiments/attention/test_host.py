"""What a call costs the CPU: the median over batches, the first of which compiles."""

import itertools

import pytest
import torch

from experiments.attention import host


def test_the_first_batch_does_not_count(monkeypatch):
    clock, called = itertools.count(), []
    # each batch takes a second more than the one before it, between two looks at the clock
    monkeypatch.setattr(host.time, "perf_counter", lambda: next(clock) ** 2 / 2)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    found = host.host_us(lambda: called.append(1))
    assert len(called) == host.CALLS * (host.BATCHES + 1)
    seconds = [((2 * i + 1) ** 2 - (2 * i) ** 2) / 2 for i in range(1, host.BATCHES + 1)]
    assert found == pytest.approx(1e6 * sum(seconds) / len(seconds) / host.CALLS)


def test_a_line_for_each_call():
    rows = [
        {"call": "causal", "name": "ours, launch", "forward_us": 9.2},
        {"call": "dropout", "name": "ours", "forward_us": 43.6, "both_us": 99.5},
    ]
    printed = host.host_table({"rows": rows}).splitlines()[2:]
    assert [[x.strip() for x in line.split("|")[1:-1]] for line in printed] == [
        ["causal", "ours, launch", "9", ""],
        ["dropout", "ours", "44", "100"],
    ]
