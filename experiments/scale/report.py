"""Tables and a picture of training steps on several GPUs."""

from itertools import product, zip_longest
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from evaluation.markdown import dict_table
from evaluation.results import Row
from evaluation.style import COLOURS, PLAIN
from experiments.scale.cases import MASKS, case_of, long_case
from experiments.scale.model import Growth, fit
from kernels.limits import MIN_RING_TOKENS
from model.config import ModelConfig

N_GPUS = (1, 2, 8, 64, 512)
CARD = 141  # memory of an H200, GiB

# Columns of several tables
CONTEXT = {"context": "{context_length:,}"}
ATTENTION = {"attention": "{attention}"}
STEP = {"step time": "{step_s:.3g} s"}
SPEED = {"tokens/s": "{tokens_per_s:,.0f}"}
ONE_AND_TWO = {
    "1 GPU, tokens/s": "{tokens_per_s_base:,.0f}",
    "2 GPUs, tokens/s": "{tokens_per_s:,.0f}",
}
MFU = {"MFU, causal / full": "{mfu}"}
MEMORY = {
    "peak memory": "{peak_gib:.1f} GiB",
    "--dry-run estimate": "{estimated_gib:.1f} GiB, {estimate_error:+.0%}",
}


def _steps(result: Row, part: str) -> pd.DataFrame:
    """Rows of a part, with the columns that its tables derive from them."""
    rows = [row for row in result["rows"] if row["part"] == part]
    steps = pd.DataFrame(rows)
    steps["attention"] = steps["way"].str.partition(",")[0]
    steps["tokens_per_gpu"] = steps["batch_tokens"] // steps["n_gpus"]
    steps["estimated_gib"] = [case_of(row).estimated_gib for row in rows]
    steps["estimate_error"] = steps["estimated_gib"] / steps["peak_gib"] - 1
    steps["mfu"] = [
        f"{row['mfu']['causal']:.1%} / {row['mfu']['full']:.1%}" if row["mfu"] else "-"
        for row in rows
    ]
    return steps


def _table(steps: pd.DataFrame, columns: dict[str, str]) -> str:
    """Markdown table of `columns`, which maps heads to `str.format` templates of cells."""
    rows = steps.to_dict("records")
    return dict_table(
        {head: cell.format_map(row) for head, cell in columns.items()} for row in rows
    )


def _compare(steps: pd.DataFrame, base: pd.DataFrame, *same: str) -> pd.DataFrame:
    """Join steps with those of `base` that have the same values, and add the speedup `times`."""
    both = steps.merge(base, on=same, suffixes=("", "_base"))
    return both.assign(times=both["tokens_per_s"] / both["tokens_per_s_base"])


def _one_and_two(steps: pd.DataFrame, *same: str) -> pd.DataFrame:
    return _compare(steps.query("n_gpus == 2"), steps.query("n_gpus == 1"), *same)


def ddp_table(result: Row) -> str:
    """Tokens/s of one and two GPUs under ddp, and the scaling efficiency."""
    both = _one_and_two(_steps(result, "ddp"), "context_length", "tokens_per_gpu")
    both["share"] = both["times"] / 2
    both["n"] = both["tokens_per_gpu"] // (both["micro_batch_size"] * both["context_length"])
    columns = {"micro-batches per step": "{n}", **ONE_AND_TWO, "scaling efficiency": "{share:.1%}"}
    return _table(both, CONTEXT | columns)


def fsdp_table(result: Row) -> str:
    """GPT-2 medium: tokens/s and memory of fsdp compared with ddp."""
    steps = _steps(result, "fsdp")
    both = _compare(steps, steps.query("way == 'ddp'"), "context_length")
    columns = {**CONTEXT, "parallelism": "{way}", **SPEED, "x ddp": "{times:.3f}", **MEMORY}
    return _table(both, columns)


def muon_table(result: Row) -> str:
    """GPT-2 medium with fsdp: tokens/s of Muon compared with AdamW."""
    steps = _steps(result, "muon")
    steps["optimizer"] = ["Muon" if way.endswith("muon") else "AdamW" for way in steps["way"]]
    both = _compare(steps, steps.query("way == 'fsdp'"), "n_gpus", "batch_tokens")
    shape = {"GPUs": "{n_gpus}", "tokens per step": "{batch_tokens:,}"}
    columns = {**shape, "optimizer": "{optimizer}", **SPEED}
    return _table(both, {**columns, "x AdamW": "{times:.3f}", **MEMORY})


def large_table(result: Row) -> str:
    """Models that need two GPUs."""
    steps = _steps(result, "large")
    steps["checkpointing"] = steps["way"].str.removeprefix("fsdp, ")
    checkpointing = {"activation checkpointing": "{checkpointing}"}
    columns = {"model": "{model}", **CONTEXT, **checkpointing, **SPEED, **MFU, **MEMORY}
    return _table(steps, columns)


def context_table(result: Row) -> str:
    """One sequence per step, on one GPU and sharded over two."""
    both = _one_and_two(_steps(result, "context"), "context_length", "way", "attention")
    peaks = {"peak memory, 1 / 2 GPUs": "{peak_gib_base:.1f} / {peak_gib:.1f} GiB"}
    columns = {**CONTEXT, **ATTENTION, **ONE_AND_TWO, "speedup": "{times:.2f}x", **peaks}
    return _table(both, columns)


def long_table(result: Row) -> str:
    """Long contexts on two GPUs."""
    steps = _steps(result, "long")
    columns = {**CONTEXT, **ATTENTION, **STEP, **SPEED, **MFU, **MEMORY}
    return _table(steps.query("n_gpus == 2"), columns)


def longest_table(result: Row) -> str:
    """Longest contexts that were measured, close to the limit of GPU memory."""
    columns = {"GPUs": "{n_gpus}", **CONTEXT, "step time": "{step_s:.1f} s", **MEMORY}
    return _table(_steps(result, "longest"), columns)


def predicted_table(result: Row) -> str:
    """Step time of two GPUs: measured, and predicted from one GPU."""
    steps = _steps(result, "long")
    growths, two = _growths(steps), steps.query("n_gpus == 2")
    lengths = zip(two["attention"], two["context_length"], strict=True)
    two = two.assign(predicted_s=[growths[mask].seconds(length, 2) for mask, length in lengths])
    two["error"] = two["predicted_s"] / two["step_s"] - 1
    predicted = {"predicted": "{predicted_s:.3g} s", "error": "{error:+.1%}"}
    return _table(two, CONTEXT | ATTENTION | STEP | predicted)


def draw(result: Row) -> Figure:
    """Draw memory per GPU and speed over context length: measured on 1 and 2 GPUs, predicted."""
    steps = _steps(result, "long")
    growths = _growths(steps)
    figure = Figure(figsize=(11, 5), layout="constrained")
    memory, speed = figure.subplots(1, 2)
    lengths = [2**n for n in range(16, 26)]
    colours = dict(zip(N_GPUS, COLOURS, strict=False))
    lines = {"dense": "-", "butterfly": "--"}
    markers = {"dense": "o", "butterfly": "s"}
    for n_gpus, colour in colours.items():
        estimates = {
            n: long_case("long", n, "dense", n_gpus, "selective").estimated_gib
            for n in lengths
            if n >= MIN_RING_TOKENS * n_gpus
        }
        memory.plot([*estimates], [*estimates.values()], color=colour, linewidth=1)
        fitting = [n for n, gib in estimates.items() if gib <= CARD]
        for mask, growth in growths.items():
            speeds = [n / growth.seconds(n, n_gpus) for n in fitting]
            speed.plot(fitting, speeds, color=colour, linewidth=1, linestyle=lines[mask])
    for n_gpus, mask in product(colours, MASKS):
        measured = steps.query("n_gpus == @n_gpus and attention == @mask")
        dots = {"marker": markers[mask], "color": colours[n_gpus], "ls": ""}
        memory.plot(measured["context_length"], measured["peak_gib"], **dots)
        speed.plot(measured["context_length"], measured["tokens_per_s"], **dots)
    memory.axhline(CARD, color=PLAIN, linewidth=0.8)
    memory.set(title="line: --dry-run estimate (dense)", ylabel="peak memory per GPU, GiB")
    memory.set_ylim(1, 300)
    speed.set(title="line: predicted from 1 GPU", ylabel="tokens/s, all GPUs together")
    memory.text(lengths[0], 1.1 * CARD, "memory of an H200", color=PLAIN)
    for axes in (memory, speed):
        axes.title.set_size(10)
        axes.set(xscale="log", yscale="log", xlabel="context length, tokens")
        axes.set_xticks(lengths[::2], [_short(n) for n in lengths[::2]])
        axes.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
    # The first line of the legend has colours, the second markers and line styles. Matplotlib
    # fills the legend column by column.
    colour_entries = [
        Line2D([], [], color=colour, lw=4, label=f"{n_gpus} GPU{'s' * (n_gpus > 1)}")
        for n_gpus, colour in colours.items()
    ]
    shapes: dict[str, dict[str, Any]]
    shapes = {f"{mask}, measured": {"marker": markers[mask], "ls": ""} for mask in MASKS}
    shapes |= {f"{mask}, predicted": {"ls": lines[mask], "lw": 1} for mask in MASKS}
    shape_entries = [Line2D([], [], color="black", label=name, **x) for name, x in shapes.items()]
    pairs = zip_longest(colour_entries, shape_entries)
    entries = [entry for pair in pairs for entry in pair if entry is not None]
    figure.legend(handles=entries, frameon=False, loc="outside upper center", ncols=len(N_GPUS))
    return figure


def _short(n_tokens: int) -> str:
    return f"{n_tokens >> 20}M" if n_tokens >= 2**20 else f"{n_tokens >> 10}K"


def _growths(steps: pd.DataFrame) -> dict[str, Growth]:
    """Fit a Growth for each mask to the steps of one GPU."""
    models = {mask: ModelConfig(positions="rotary", mask=config) for mask, config in MASKS.items()}
    alone = steps.loc[steps["n_gpus"] == 1, ["attention", "context_length", "step_s"]]
    return fit(models, [*alone.itertuples(index=False, name=None)])
