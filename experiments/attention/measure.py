"""The measurements of experiments.attention: time and memory, and a row of them."""

import gc
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from evaluation.results import Row
from experiments.attention.cases import Attention, Case, Tensors, make_tensors
from experiments.attention.check import Answer, answer, checked_case, errors, verdict
from experiments.attention.peers import CONTENDERS, TENSORS, UnsupportedError
from experiments.attention.report import heading, label

LONG_MS = 20.0  # a run this long is timed three times
TIMED_MS = 100.0  # how long a shorter one is timed in all, at most MAX_RUNS times
MAX_RUNS = 200
L2_BYTES = 2**28  # more than any GPU's L2 cache holds
GPU_HZ = 2e9  # at least the clock of any GPU: at a lower one it sleeps longer


def time_ms(run: Callable[[], Any]) -> dict[str, float]:
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
    if first < LONG_MS:
        found = times(min(math.ceil(TIMED_MS / first), MAX_RUNS))
    else:
        found = [first, *times(2)]
    ms, ms_20, ms_80 = torch.tensor(found).quantile(torch.tensor([0.5, 0.2, 0.8])).tolist()
    return {"ms": ms, "ms_20": ms_20, "ms_80": ms_80}


def eager_ms(run: Callable[[], Any]) -> float:
    """Milliseconds from call to call, where nothing else keeps CPU or GPU busy: the median.

    On short sequences that is the time in which the CPU launches the kernels.
    """
    from triton.testing import do_bench

    ms: Any = do_bench(run, return_mode="median")
    return ms


def peak_mib(run: Callable[[], Any]) -> float:
    """The most memory that a run takes beside what is allocated already, MiB."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def speeds(attention: Attention, tensors: Tensors, case: Case) -> dict[str, float]:
    """Times of the forward, of the backward alone and of both, TFLOP/s, and peak memory of both."""
    q, k, v, dout = tensors

    def both() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(attention(q, k, v), (q, k, v), dout)

    both()  # what compiles may take memory of its own
    result = {"peak_mib": peak_mib(both)}
    times = {"both": time_ms(both), "forward": time_ms(lambda: attention(q, k, v))}
    if times["both"]["ms"] < LONG_MS:
        result["both_eager_ms"] = eager_ms(both)
    out = attention(q, k, v)
    times["backward"] = time_ms(
        lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    )
    for part, flops in (("forward", 1.0), ("backward", 2.5), ("both", 3.5)):
        result |= {f"{part}_{key}": x for key, x in times[part].items()}
        result[f"{part}_tflops"] = flops * case.forward_flops / times[part]["ms"] / 1e9
    return result


def measure(name: str, case: Case, tensors: Tensors, expected: Answer) -> Row:
    """One row: the case, `status`, the errors, and if the contender is right its speeds.

    `expected` is the answer to `checked_case(name, case)`.
    """
    row: Row = {"name": name, **case.describe()}
    checked = checked_case(name, case)
    try:
        attention = CONTENDERS[name](case, tensors.q.device)
        same = attention if checked == case else CONTENDERS[name](checked, tensors.q.device)
        if name in TENSORS:
            tensors = TENSORS[name](tensors)
        row["errors"] = errors(same, tensors, expected)
        row["error_budgets"] = expected.budgets
        row["status"] = verdict(row["errors"], expected.budgets)
        if row["status"] == "ok":
            row |= speeds(attention, tensors, case)
    except torch.cuda.OutOfMemoryError:
        row["status"] = "out of memory"
    except UnsupportedError as reason:
        row["status"] = f"not supported: {reason}"
    return row


def measure_case(case: Case, names: Sequence[str], device: str = "cuda") -> list[Row]:
    """A row for each contender, all on the same values; prints each as it comes."""
    tensors = make_tensors(case, device)
    answers: dict[Case, Answer] = {}
    rows = []
    for name in names:
        gc.collect()  # also what a contender left that ran out of memory
        torch.cuda.empty_cache()
        checked = checked_case(name, case)
        if checked not in answers:
            answers[checked] = answer(checked, tensors)
        rows.append(measure(name, case, tensors, answers[checked]))
        print(progress(rows[-1]), flush=True)
    return rows


def progress(row: Row) -> str:
    """A row in one line."""
    line = f"{heading(row):34} {label(row):24}"
    if row["status"] != "ok":
        return f"{line} {row['status']}"
    forward, backward = row["forward_ms"], row["backward_ms"]
    return f"{line} forward {forward:9.3f} ms, backward {backward:9.3f} ms"
