"""docs/results/history.csv: headline numbers of each measurement, one row per result.

The commands that measure append to it (`experiments.harness`), so a change of a kernel or of a
version shows up as two rows that differ.
"""

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from data.files import write_atomically
from evaluation.results import Row

Result = Mapping[str, Any]
Number = Callable[[Result], float]

KEYS = ("commit", "date", "device", "torch", "triton")


def _value(key: str, **wanted: object) -> Number:
    """Number `key` of the row that has these values."""

    def number(result: Result) -> float:
        (row,) = (row for row in result["rows"] if wanted.items() <= row.items())
        return row[key]

    return number


def _ratio(above: Number, below: Number) -> Number:
    return lambda result: above(result) / below(result)


def _geometric_mean(key: str) -> Number:
    """Geometric mean of Papilio's rows of dense attention."""

    def number(result: Result) -> float:
        rows: Sequence[Row] = result["rows"]
        values = [row[key] for row in rows if (row["name"], row["mask"]) == ("ours", "dense")]
        return math.prod(values) ** (1 / len(values))

    return number


def _step(context_length: int, name: str = "ours") -> Number:
    return _value("tokens_per_s", size="small", context_length=context_length, name=name)


def _butterfly(part: str) -> Number:
    shape = {"seq_len": 16_384, "head_dim": 128, "causal": True, "mask": "butterfly"}
    return _value(f"{part}_ms", name="ours", **shape)


TINYLLAMA = {"model": "TinyLlama (transformers), 4,096 tokens, causal"}

NUMBERS: dict[str, dict[str, Number]] = {
    "attention_hopper": {
        "forward TFLOP/s": _geometric_mean("forward_tflops"),
        "backward TFLOP/s": _geometric_mean("backward_tflops"),
        "forward / best other": _geometric_mean("forward_over_best_peer"),
        "backward / best other": _geometric_mean("backward_over_best_peer"),
        "backward / best that repeats": _geometric_mean("backward_over_best_repeatable"),
    },
    "attention_butterfly": {
        "butterfly forward, ms": _butterfly("forward"),
        "butterfly backward, ms": _butterfly("backward"),
    },
    "train_speed": {
        "1K step, tokens/s": _step(1024),
        "4K step, tokens/s": _step(4096),
        "1K step / nanoGPT": _ratio(_step(1024, "ours, no biases"), _step(1024, "nanoGPT, cuDNN")),
    },
    "registered_step": {
        "TinyLlama step / PyTorch's choice": _ratio(
            _value("step_s", **TINYLLAMA, backend="PyTorch's choice"),
            _value("step_s", **TINYLLAMA, backend="Papilio, registered"),
        ),
    },
    "attention_host": {
        "CPU time of a call, us": _value("in_row_us", call="causal", name="ours"),
    },
}
"""Twelve headline numbers: the columns of the file, by the result that has them."""

COLUMNS = ("result", *KEYS, *(name for numbers in NUMBERS.values() for name in numbers))


def append(path: Path, result: Result) -> None:
    """Append the numbers of a result to history.csv in the folder of `path`, NAME.json.

    A result without headline numbers appends nothing. Numbers that it lacks, such as comparisons
    with peers that were not installed, are left empty.
    """
    numbers = {}
    for name, number in NUMBERS.get(path.stem, {}).items():
        with suppress(KeyError, ValueError, ZeroDivisionError):  # a row or a comparison is missing
            numbers[name] = f"{float(f'{number(result):.5g}'):g}"
    if not numbers:
        return
    environment = {key: result["environment"][key] for key in KEYS}
    file = path.with_name("history.csv")
    text = io.StringIO(file.read_text() if file.exists() else "")
    writer = csv.DictWriter(text, COLUMNS, restval="", lineterminator="\n")
    if text.seek(0, io.SEEK_END) == 0:
        writer.writeheader()
    writer.writerow({"result": path.stem, **environment, **numbers})
    write_atomically(file, text.getvalue().encode())
