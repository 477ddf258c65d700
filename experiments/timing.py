"""Clocks and the peak of memory: how kernels, calls and training steps are measured.

Three clocks answer three questions. `gpu_ms` times a kernel by CUDA events and leaves out the CPU.
`wall_seconds` times training steps, from an idle GPU to an idle GPU. `cpu_seconds` times the launch
alone and does not wait for the GPU.
"""

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

LONG_MS = 20.0  # a run this long is timed three times
TIMED_MS = 100.0  # how long a shorter one is timed in all, at most MAX_RUNS times
MAX_RUNS = 200
L2_BYTES = 2**28  # more than any GPU's L2 cache holds
GPU_HZ = 2e9  # at least the clock of any GPU: at a lower one it sleeps longer

Call = Callable[[], object]


def gpu_ms(run: Call) -> dict[str, float]:
    """Milliseconds that the GPU takes for a run: the median, and its 20% and 80% quantiles.

    The CPU's share is left out, which on short sequences is the larger: the GPU sleeps while the
    CPU queues the run, as in training it would be busy with what was queued before. L2 is emptied
    before each run.
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
    found = times(min(math.ceil(TIMED_MS / first), MAX_RUNS)) if short else [first, *times(2)]
    ms, ms_20, ms_80 = torch.tensor(found).quantile(torch.tensor([0.5, 0.2, 0.8])).tolist()
    return {"ms": ms, "ms_20": ms_20, "ms_80": ms_80}


def eager_ms(run: Call) -> float:
    """Milliseconds from call to call, where nothing else keeps CPU or GPU busy: the median.

    On short sequences that is the time in which the CPU launches the kernels.
    """
    from triton.testing import do_bench

    ms: Any = do_bench(run, return_mode="median")
    return ms


def wall_seconds(call: Call, n: int = 1, *, barrier: Call | None = None) -> float:
    """Mean seconds of n calls in a row, from an idle GPU until it has done all of them.

    Processes that are timed together start at the `barrier`.
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
    """Mean seconds that the CPU takes for each of n calls in a row; the GPU may still be busy."""
    wait_for_gpu()
    start = time.perf_counter()
    for _ in range(n):
        call()
    return (time.perf_counter() - start) / n


def reset_compiler_and_memory() -> None:
    """Forget what was compiled, and free the memory that nobody holds, also that of cycles."""
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


def wait_for_gpu() -> None:
    """Wait until the GPU has done all that was asked of it; nothing to wait for on a CPU."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def in_turns(
    calls: Mapping[str, Call], rounds: int, clock: Callable[[Call], float]
) -> dict[str, list[float]]:
    """Times of each of `calls` by a `clock`, one in each round.

    The calls alternate, so that drifting clocks and other work on the machine meet all of them.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(clock(call))
    return times


def spread(name: str, times: Sequence[float]) -> dict[str, float]:
    """The median of times and its ends, as a row of a result holds them."""
    ends = {f"{name}_fastest": min(times), f"{name}_slowest": max(times)}
    return {name: statistics.median(times), **ends}


def peak_mib(run: Call) -> float:
    """The most memory that a run takes in addition to what is allocated already, MiB."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return (torch.cuda.max_memory_allocated() - before) / 2**20
