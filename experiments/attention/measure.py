"""Measurements of experiments.attention: time, memory and errors of a contender."""

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch._dynamo.exc import TorchDynamoException

from evaluation.results import Row
from experiments.attention.approximate import APPROXIMATE, COMPILED
from experiments.attention.cases import (
    Attention,
    Case,
    Tensors,
    UnsupportedError,
    make_tensors,
)
from experiments.attention.check import (
    ANY_FINITE,
    Answer,
    answer,
    checked_case,
    errors,
    verdict,
)
from experiments.attention.peers import CONTENDERS, SETTINGS, TENSORS
from experiments.attention.report import PASSES, heading, label
from experiments.timing import (
    LONG_MS,
    Call,
    eager_ms,
    gpu_ms,
    in_turns,
    peak_mib,
    quantiles,
    reset_compiler_and_memory,
)

FLOPS = {"forward": 1.0, "backward": 2.5, "both": 3.5}  # over those of the forward pass
ROUND_MS = 30.0  # time of a contender's calls in a round, of each pass


def speeds(attention: Attention, tensors: Tensors, case: Case) -> dict[str, float]:
    """Times of forward, backward and both, TFLOP/s, and the peak memory of both."""
    q, k, v, dout = tensors

    def both() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(attention(q, k, v), (q, k, v), dout)

    both()  # warm up: compilation may allocate memory
    result = {"peak_mib": peak_mib(both)}
    times = {"both": gpu_ms(both), "forward": gpu_ms(lambda: attention(q, k, v))}
    if times["both"]["ms"] < LONG_MS:
        result["both_eager_ms"] = eager_ms(both)
    out = attention(q, k, v)
    times["backward"] = gpu_ms(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True))
    for part in FLOPS:
        result |= {f"{part}_{key}": x for key, x in times[part].items()}
        result[f"{part}_tflops"] = tflops(part, times[part]["ms"], case)
    return result


def tflops(part: str, ms: float, case: Case) -> float:
    """TFLOP/s of the forward or backward pass, or of both, that took `ms`."""
    return FLOPS[part] * case.forward_flops / ms / 1e9


def time_in_rounds(rows: Sequence[Row], case: Case, tensors: Tensors, rounds: int) -> None:
    """Time the passes of all contenders with correct results again, in turns.

    A card's clock drifts, by several percent from one contender to the next. The time of a pass
    becomes the median of its rounds, and `PASS_round_ms` lists them.
    """
    calls: dict[str, Call] = {}
    right = [row for row in rows if row["status"] == "ok"]
    for name in (row["name"] for row in right):
        attention = CONTENDERS[name](case, tensors.q.device)
        own = TENSORS[name](tensors) if name in TENSORS else tensors
        calls |= {f"{name} {part}": call for part, call in passes(name, attention, own).items()}
    times = in_turns(calls, rounds, lambda call: gpu_ms(call, ROUND_MS)["ms"])
    for row in right:
        for part in PASSES:
            row[f"{part}_round_ms"] = ms = times[f"{row['name']} {part}"]
            row |= {f"{part}_{key}": x for key, x in quantiles(ms).items()}
            row[f"{part}_tflops"] = tflops(part, row[f"{part}_ms"], case)


def passes(name: str, attention: Attention, tensors: Tensors) -> dict[str, Call]:
    """The forward pass, and the backward pass on a saved forward pass, in a peer's settings."""
    settings = SETTINGS.get(name, nullcontext)
    q, k, v, dout = tensors

    def forward() -> torch.Tensor:
        with settings():
            return attention(q, k, v)

    out = forward()

    def backward() -> tuple[torch.Tensor, ...]:
        with settings():
            return torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

    return {"forward": forward, "backward": backward}


def repeats(attention: Attention, tensors: Tensors, runs: int) -> bool:
    """Whether out and all gradients are bit for bit the same in each of `runs` runs."""
    q, k, v, dout = tensors

    def run() -> tuple[torch.Tensor, ...]:
        out = attention(q, k, v)
        return out, *torch.autograd.grad(out, (q, k, v), dout)

    first = run()
    return all(all(map(torch.equal, first, run())) for _ in range(runs - 1))


def measure(name: str, case: Case, tensors: Tensors, expected: Answer, runs: int = 0) -> Row:
    """Measure one row: the case, `status`, the errors, and the speeds if the result is correct.

    `expected` is the answer to `checked_case(name, case)`. With `runs`, the row also says whether
    that many runs gave the same bits, `repeats`.
    """
    with SETTINGS.get(name, nullcontext)():
        return _measure(name, case, tensors, expected, runs)


def _measure(name: str, case: Case, tensors: Tensors, expected: Answer, runs: int) -> Row:
    row: Row = {"name": name, **case.describe()}
    checked = checked_case(name, case)
    try:
        attention = CONTENDERS[name](case, tensors.q.device)
        to_check = attention if checked == case else CONTENDERS[name](checked, tensors.q.device)
        if name in TENSORS:
            tensors = TENSORS[name](tensors)
        row["errors"] = errors(to_check, tensors, expected)
        row["error_budgets"] = ANY_FINITE if name in APPROXIMATE else expected.budgets
        row["status"] = verdict(row["errors"], row["error_budgets"])
        if row["status"] == "ok":
            row |= speeds(attention, tensors, case)
            if runs > 0:
                row["repeats"] = repeats(attention, tensors, runs)
    except torch.cuda.OutOfMemoryError:
        row["status"] = "out of memory"
    except UnsupportedError as reason:
        row["status"] = f"not supported: {reason}"
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        if name.startswith("ours") or not is_refusal(name, error):
            raise
        reason = str(error).strip() or type(error).__name__
        row["status"] = f"not supported: {reason.splitlines()[-1]}"
    return row


def is_refusal(name: str, error: Exception) -> bool:
    """Whether a peer refuses the case, rather than fails: by an assertion, or for its backend.

    A compiled approximation may also be refused by the compiler.
    """
    known = isinstance(error, (AssertionError, NotImplementedError))
    known = known or (name in COMPILED and isinstance(error, TorchDynamoException))
    return known or "BACKEND='FLASH'" in str(error)


def measure_case(
    case: Case, names: Sequence[str], device: str = "cuda", runs: int = 0, rounds: int = 0
) -> list[Row]:
    """Measure a row for each contender on the same values, and print each row.

    `runs` is that of `measure`. With `rounds`, the passes are timed by `time_in_rounds`.
    """
    tensors = make_tensors(case, device)
    answers: dict[Case, Answer] = {}
    rows = []
    for name in names:
        reset_compiler_and_memory()  # also frees what an out-of-memory contender left
        checked = checked_case(name, case)
        if checked not in answers:
            answers[checked] = answer(checked, tensors)
        rows.append(measure(name, case, tensors, answers[checked], runs))
        print(progress(rows[-1]), flush=True)
    if rounds > 0:
        reset_compiler_and_memory()
        time_in_rounds(rows, case, tensors, rounds)
        print(f"timed {rounds} rounds", flush=True)
    return rows


def progress(row: Row) -> str:
    """Format a row in one line."""
    line = f"{heading(row):34} {label(row):24}"
    if row["status"] != "ok":
        return f"{line} {row['status']}"
    forward, backward = row["forward_ms"], row["backward_ms"]
    return f"{line} forward {forward:9.3f} ms, backward {backward:9.3f} ms"
