"""The tables of attention's speed in README.md and docs, of rows that `measure` took."""

from collections.abc import Mapping
from typing import Any

from evaluation.results import Row
from experiments.reports import table

Result = Mapping[str, Any]


def dense_table(result: Result) -> str:
    """Dense attention, ours and others' (--preset peers), in TFLOP/s."""
    lines: dict[tuple[int, bool, int], dict[str, str]] = {}
    for row in result["rows"]:
        if row["mask"] == "dense":
            line = lines.setdefault(_key(row), _problem(row))
            line[row["name"]] = _both(row, "tflops", ".0f")
    return table(line for line in lines.values() if len(line) > 4)  # a peer beside ours


def butterfly_table(result: Result) -> str:
    """A full butterfly, ours and FlexAttention's (--preset peers)."""
    rows = [row for row in result["rows"] if row["mask"] != "dense"]
    flex = {_key(row): row for row in rows if row["name"] == "FlexAttention"}
    return table(
        {
            **_problem(row),
            "density": f"{row['density']:.4f}",
            "ours, ms": _both(row, "ms", ".2f"),
            "FlexAttention, ms": _both(flex[_key(row)], "ms", ".2f"),
            "ours / (density x our dense time)": _both(row, "over_proportional", ".2f"),
        }
        for row in rows
        if row["name"] == "ours"
    )


def paper_table(result: Result) -> str:
    """The paper's Figure 3 (--preset paper)."""
    lines: dict[int, dict[str, str]] = {}
    for row in result["rows"]:
        if row["variant"] != "plain":
            continue
        line = lines.setdefault(row["seq_len"], {"tokens": f"{row['seq_len']:,}"})
        if row["mask"] == "dense":
            line[row["name"]] = _time_and_memory(row)
        else:
            line["ours, block-sparse"] = _time_and_memory(row)
            line["speed-up over dense"] = f"{row['speedup']:.1f}"
            line["the paper's"] = f"{row['paper_speedup']:.1f}"
    return table(lines.values())


def _key(row: Row) -> tuple[int, bool, int]:
    return row["head_dim"], row["causal"], row["seq_len"]


def _problem(row: Row) -> dict[str, str]:
    return {
        "head_dim": str(row["head_dim"]),
        "mask": "causal" if row["causal"] else "full",
        "tokens": f"{row['seq_len']:,}",
    }


def _both(row: Row, what: str, how: str) -> str:
    """A number of the forward and of the backward pass."""
    if row["status"] != "ok":
        return row["status"].split(":")[0]
    return " / ".join(format(row[f"{part}_{what}"], how) for part in ("forward", "backward"))


def _time_and_memory(row: Row) -> str:
    """Forward and backward: milliseconds of the GPU, and peak MiB."""
    if row["status"] != "ok":
        return row["status"]
    return f"{row['both_ms']:,.2f} ms, {row['peak_mib']:,.0f} MiB"
