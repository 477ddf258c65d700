"""Timing and peak memory of kernels, calls and training steps.

`gpu_ms` times kernels with CUDA events, without the CPU. `wall_seconds` times training steps, from
an idle GPU to an idle GPU. `cpu_seconds` times launches only and does not wait for the GPU.
"""

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

LONG_MS = 20.0  # a call this long is timed three times
TIMED_MS = 100.0  # total time of a shorter call's timings, at most MAX_RUNS of them
MAX_RUNS = 200
L2_BYTES = 2**28  # larger than the L2 cache of any GPU
GPU_HZ = 2e9  # at least the clock rate of any GPU; a slower one sleeps longer

Call = Callable[[], object]


def gpu_ms(run: Call, timed_ms: float = TIMED_MS) -> dict[str, float]:
    """GPU time of a call in milliseconds: the median, and the 20% and 80% quantiles.

    Calls shorter than LONG_MS are timed for `timed_ms` in total.

    CPU time, which dominates on short sequences, is excluded: the GPU sleeps while the CPU queues
    the call, as in training it would be busy with earlier kernels. The L2 cache is flushed before
    each call.
    """
    run()  # compiles
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    queue_s = time.perf_counter() - start
    torch.cuda.synchronize()
    l2 = torch.empty(L2_BYTES, dtype=torch.int8, device="cuda")

    def record() -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        l2.zero_()
        torch.cuda._sleep(int((2 * queue_s + 1e-4) * GPU_HZ))
        start.record()
        run()
        end.record()
        return start, end

    def times(runs: int) -> list[float]:
        recorded = [record() for _ in range(runs)]
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in recorded]

    (first,) = times(1)
    short = first < LONG_MS
    samples = times(min(math.ceil(timed_ms / first), MAX_RUNS)) if short else [first, *times(2)]
    return quantiles(samples)


def quantiles(ms: Sequence[float]) -> dict[str, float]:
    """Median of times in milliseconds, `ms`, and their 20% and 80% quantiles."""
    values = torch.tensor(ms).quantile(torch.tensor([0.5, 0.2, 0.8])).tolist()
    return dict(zip(("ms", "ms_20", "ms_80"), values, strict=True))


def eager_ms(run: Call) -> float:
    """Median milliseconds from call to call, with CPU and GPU otherwise idle.

    On short sequences, this is the CPU time of the kernel launches.
    """
    from triton.testing import do_bench

    ms: Any = do_bench(run, return_mode="median")
    return ms


def wall_seconds(call: Call, n: int = 1, *, barrier: Call | None = None) -> float:
    """Mean seconds of n calls in a row, from an idle GPU until all of them are done.

    Processes that are timed together synchronize at the `barrier` first.
    """
    wait_for_gpu()
    if barrier is not None:
        barrier()
    start = time.perf_counter()
    for _ in range(n):
        call()
    wait_for_gpu()
    return (time.perf_counter() - start) / n


def cpu_seconds(call: Call, n: int = 1) -> float:
    """Mean CPU seconds of n calls in a row; the GPU may still be busy afterwards."""
    wait_for_gpu()
    start = time.perf_counter()
    for _ in range(n):
        call()
    return (time.perf_counter() - start) / n


def reset_compiler_and_memory() -> None:
    """Reset the compiler, and free unused memory, including that of reference cycles."""
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


def wait_for_gpu() -> None:
    """Wait until the GPU has finished all queued work; does nothing on a CPU."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def in_turns(
    calls: Mapping[str, Call], rounds: int, clock: Callable[[Call], float]
) -> dict[str, list[float]]:
    """Time all `calls` with a `clock`, once per round each.

    The calls alternate, so that drifting clocks and other load affect all of them equally.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(clock(call))
    return times


def spread(name: str, times: Sequence[float]) -> dict[str, float]:
    """Median and range of times, as entries of a result's row."""
    ends = {f"{name}_fastest": min(times), f"{name}_slowest": max(times)}
    return {name: statistics.median(times), **ends}


def peak_mib(run: Call) -> float:
    """Peak memory of a call in addition to what is already allocated, MiB."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return (torch.cuda.max_memory_allocated() - before) / 2**20
