"""The measurements of scripts/benchmark_attention.py: time and memory, and a row of them."""

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch

from scripts.attention_cases import Attention, Case, Tensors, make_tensors
from scripts.attention_check import Answer, answer, checked_case, errors, verdict
from scripts.attention_peers import CONTENDERS, TENSORS, UnsupportedError
from scripts.attention_tables import Row, heading, label

LONG_MS = 20.0  # a run this long is timed three times; shorter ones for a tenth of a second


def time_ms(run: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds of a run on the GPU: the median, and its 20% and 80% quantiles."""
    from triton.testing import do_bench

    quantiles = [0.5, 0.2, 0.8]

    def once() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)

    run()  # compiles
    if (first := once()) < LONG_MS:
        ms: Any = do_bench(run, quantiles=quantiles)
    else:
        times = torch.tensor([first, once(), once()])
        ms = times.quantile(torch.tensor(quantiles)).tolist()
    return dict(zip(("ms", "ms_20", "ms_80"), ms, strict=True))


def graph_ms(run: Callable[[], Any]) -> float:
    """Milliseconds of a run that is replayed as a CUDA graph: without the CPU's share, the median.

    On short sequences the CPU takes longer to launch kernels than the GPU to run them.
    """
    from triton.testing import do_bench

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    ms: Any = do_bench(graph.replay, return_mode="median")
    return ms


def peak_mib(run: Callable[[], Any]) -> float:
    """The most memory that a run takes beside what is allocated already, MiB."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def speeds(
    attention: Attention, tensors: Tensors, case: Case, *, graphs: bool = False
) -> dict[str, float]:
    """Times of the forward, of the backward alone and of both, TFLOP/s, and peak memory of both.

    `graphs`: both as a CUDA graph too.
    """
    q, k, v, dout = tensors

    def both() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(attention(q, k, v), (q, k, v), dout)

    both()  # what compiles may take memory of its own
    result = {"peak_mib": peak_mib(both)}
    times = {"both": time_ms(both), "forward": time_ms(lambda: attention(q, k, v))}
    if graphs:
        result["both_graph_ms"] = graph_ms(both)
    out = attention(q, k, v)
    times["backward"] = time_ms(
        lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    )
    for part, flops in (("forward", 1.0), ("backward", 2.5), ("both", 3.5)):
        result |= {f"{part}_{key}": x for key, x in times[part].items()}
        result[f"{part}_tflops"] = flops * case.forward_flops / times[part]["ms"] / 1e9
    return result


def measure(
    name: str, case: Case, tensors: Tensors, expected: Answer, *, graphs: bool = False
) -> Row:
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
            row |= speeds(attention, tensors, case, graphs=graphs)
    except torch.cuda.OutOfMemoryError:
        row["status"] = "out of memory"
    except UnsupportedError as reason:
        row["status"] = f"not supported: {reason}"
    return row


def measure_case(
    case: Case, names: Sequence[str], device: str = "cuda", *, graphs: bool = False
) -> list[Row]:
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
        rows.append(measure(name, case, tensors, answers[checked], graphs=graphs))
        print(progress(rows[-1]), flush=True)
    return rows


def progress(row: Row) -> str:
    """A row in one line."""
    line = f"{heading(row):34} {label(row):24}"
    if row["status"] != "ok":
        return f"{line} {row['status']}"
    forward, backward = row["forward_ms"], row["backward_ms"]
    return f"{line} forward {forward:9.3f} ms, backward {backward:9.3f} ms"
