"""Training time on a clock that moves when told to."""

from types import SimpleNamespace

import pytest
import torch

from training.stopwatch import Stopwatch

CPU = torch.device("cpu")
COMPILING = 1000.0


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=50.0)
    clock.perf_counter = lambda: clock.now
    monkeypatch.setattr("training.stopwatch.time", clock)
    return clock


def steps(watch, clock, *seconds, tokens=60):
    for each in seconds:
        clock.now += each
        watch.count(tokens)


def seconds(watch):
    return watch.gpu_hours * 3600


def test_first_step_counts_like_those_that_follow(clock):
    watch = Stopwatch(CPU)
    steps(watch, clock, COMPILING, 2.0, 4.0)
    with watch.paused():
        assert watch.tokens_per_s() == 120 / 6
        assert seconds(watch) == pytest.approx(3 * 3.0)
    steps(watch, clock, 5.0)
    with watch.paused():
        assert watch.tokens_per_s() == 60 / 5
        assert seconds(watch) == pytest.approx(9.0 + 5.0)


def test_steps_that_compile_again_count_like_those_that_follow(clock):
    watch = Stopwatch(CPU)
    steps(watch, clock, COMPILING, 2.0, 4.0)
    watch.expect_compilation()
    steps(watch, clock, COMPILING, 7.0)
    with watch.paused():
        assert watch.tokens_per_s() == 180 / 13
        assert seconds(watch) == pytest.approx(3 * 3.0 + 2 * 7.0)


def test_first_step_alone_waits_for_the_next(clock):
    watch = Stopwatch(CPU)
    steps(watch, clock, COMPILING)
    for _ in range(2):
        clock.now += 7.0
        with watch.paused():
            assert watch.tokens_per_s() is None
            assert watch.gpu_hours == 0.0
    steps(watch, clock, 2.0)
    with watch.paused():
        assert watch.tokens_per_s() == 60 / 2
        assert seconds(watch) == pytest.approx(2 * 2.0)


def test_pauses_count_nothing_and_lose_no_step(clock):
    watch = Stopwatch(CPU)
    steps(watch, clock, COMPILING, 1.0)
    for _ in range(3):  # evaluated twice between two readings of the speed
        steps(watch, clock, 2.0)
        with watch.paused():
            clock.now += 100.0
        with watch.paused():
            clock.now += 100.0
    steps(watch, clock, 3.0)
    with watch.paused():
        assert seconds(watch) == pytest.approx(1.5 + 1.0 + 3 * 2.0 + 3.0)
        assert watch.tokens_per_s() == pytest.approx(5 * 60 / 10)


def test_what_follows_the_last_step_changes_no_bit(clock):
    watch = Stopwatch(CPU, gpu_hours=0.1)
    clock.now += 9.0
    with watch.paused():
        assert watch.gpu_hours == 0.1


@pytest.mark.parametrize("n_processes", [1, 2, 8])
def test_processes_multiply_the_hours_and_not_the_speed(clock, n_processes):
    watch = Stopwatch(CPU, n_processes=n_processes, gpu_hours=5.0)
    steps(watch, clock, COMPILING, 3600.0)
    with watch.paused():
        assert watch.gpu_hours == pytest.approx(5.0 + 2 * n_processes)
        assert watch.tokens_per_s() == 60 / 3600


def test_never_goes_back(clock):
    watch, before = Stopwatch(CPU), 0.0
    for pause in range(20):
        steps(watch, clock, *[0.5] * (pause % 3))
        with watch.paused():
            assert watch.gpu_hours >= before
            before = watch.gpu_hours
    assert seconds(watch) == pytest.approx(0.5 * sum(pause % 3 for pause in range(20)))
