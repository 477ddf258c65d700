"""Clocks count what they say, contenders alternate, and a row holds the median and its ends."""

import time

import pytest
import torch

from experiments import timing
from experiments.timing import cpu_seconds, eager_ms, gpu_ms, in_turns, spread, wall_seconds


@pytest.mark.gpu
def test_a_time_leaves_out_the_cpu():
    x = torch.ones(1000, 1000, device="cuda")

    def slow_to_launch():
        time.sleep(0.003)
        x.add_(1)
        time.sleep(0.003)

    ms = gpu_ms(slow_to_launch)
    assert 0 < ms["ms_20"] <= ms["ms"] <= ms["ms_80"] < 1
    assert eager_ms(slow_to_launch) > 5


@pytest.mark.gpu
def test_long_runs_are_timed_three_times():
    runs = []

    def half_a_second():
        runs.append(1)
        torch.cuda._sleep(1_000_000_000)

    assert gpu_ms(half_a_second)["ms"] > timing.LONG_MS
    assert len(runs) == 5  # the first compiles, and the second says how long the CPU takes


@pytest.mark.gpu
def test_only_the_wall_clock_waits_for_the_gpu():
    def sleep():
        torch.cuda._sleep(100_000_000)

    sleep()  # loads the kernel
    assert cpu_seconds(sleep) < 0.01 < wall_seconds(sleep)


@pytest.mark.parametrize("clock", [wall_seconds, cpu_seconds])
def test_calls_in_a_row_are_averaged(clock, monkeypatch):
    looks, called = iter([10.0, 13.0]), []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(looks))
    assert clock(lambda: called.append(1), 6) == 0.5
    assert len(called) == 6


def test_processes_start_together(monkeypatch):
    order = []
    monkeypatch.setattr(timing, "wait_for_gpu", lambda: order.append("wait"))
    wall_seconds(lambda: order.append("step"), 2, barrier=lambda: order.append("barrier"))
    assert order == ["wait", "barrier", "step", "step", "wait"]


def test_contenders_alternate():
    clock = iter(range(6))
    calls = dict.fromkeys("ab", lambda: None)
    assert in_turns(calls, 3, lambda call: next(clock)) == {"a": [0, 2, 4], "b": [1, 3, 5]}


def test_a_row_holds_the_median_and_its_ends():
    assert spread("step_s", [3.0, 1.0, 2.5]) == {
        "step_s": 2.5, "step_s_fastest": 1.0, "step_s_slowest": 3.0
    }  # fmt: skip
