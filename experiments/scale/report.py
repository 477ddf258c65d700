"""Tables and pictures of steps on several GPUs."""

from itertools import product

import pandas as pd
from matplotlib.figure import Figure

from evaluation.results import Row
from evaluation.style import COLOURS, PLAIN
from experiments.reports import table
from experiments.scale.cases import MASKS, case_of, long_case
from experiments.scale.model import Growth, fit
from kernels.limits import RING_LEAST_TOKENS
from model.config import ModelConfig

N_GPUS = (1, 2, 8, 64, 512)
CARD = 141  # GiB, of an H200

# Columns of several tables
CONTEXT = {"context": "{context_length:,}"}
ATTENTION = {"attention": "{attention}"}
STEP = {"a step": "{step_s:.3g} s"}
SPEED = {"tokens/s": "{tokens_per_s:,.0f}"}
ONE_AND_TWO = {"one GPU, tokens/s": "{tokens_per_s_base:,.0f}", "two": "{tokens_per_s:,.0f}"}
MFU = {"MFU, causal / full": "{mfu}"}
MEMORY = {"peak": "{peak_gib:.1f} GiB", "--dry-run": "{told_gib:.1f} GiB, {told_off:+.0%}"}


def _steps(result: Row, part: str) -> pd.DataFrame:
    """The rows of a part, with what its tables derive from them."""
    rows = [row for row in result["rows"] if row["part"] == part]
    steps = pd.DataFrame(rows)
    steps["attention"] = steps["way"].str.partition(",")[0]
    steps["tokens_per_gpu"] = steps["batch_tokens"] // steps["n_gpus"]
    steps["told_gib"] = [case_of(row).told_gib for row in rows]
    steps["told_off"] = steps["told_gib"] / steps["peak_gib"] - 1
    steps["mfu"] = [
        f"{row['mfu']['causal']:.1%} / {row['mfu']['full']:.1%}" if row["mfu"] else "-"
        for row in rows
    ]
    return steps


def _table(steps: pd.DataFrame, columns: dict[str, str]) -> str:
    """A Markdown table of `columns`, whose cells are templates of `str.format`."""
    rows = steps.to_dict("records")
    return table({head: cell.format_map(row) for head, cell in columns.items()} for row in rows)


def _compare(steps: pd.DataFrame, base: pd.DataFrame, *same: str) -> pd.DataFrame:
    """Steps next to those of `base` with the same values, and how many times as fast they are."""
    both = steps.merge(base, on=same, suffixes=("", "_base"))
    return both.assign(times=both["tokens_per_s"] / both["tokens_per_s_base"])


def _one_and_two(steps: pd.DataFrame, *same: str) -> pd.DataFrame:
    return _compare(steps.query("n_gpus == 2"), steps.query("n_gpus == 1"), *same)


def ddp_table(result: Row) -> str:
    """Tokens a second of one GPU and of two, and what that is of twice as much."""
    both = _one_and_two(_steps(result, "ddp"), "context_length", "tokens_per_gpu")
    both["share"] = both["times"] / 2
    both["n"] = both["tokens_per_gpu"] // (both["micro_batch_size"] * both["context_length"])
    columns = {"micro-batches a step": "{n}", **ONE_AND_TWO, "of twice one": "{share:.1%}"}
    return _table(both, CONTEXT | columns)


def fsdp_table(result: Row) -> str:
    """GPT-2 medium: tokens a second and memory of sharing out, against ddp."""
    steps = _steps(result, "fsdp")
    both = _compare(steps, steps.query("way == 'ddp'"), "context_length")
    columns = {**CONTEXT, "weights": "{way}", **SPEED, "of ddp": "{times:.1%}", **MEMORY}
    return _table(both, columns)


def large_table(result: Row) -> str:
    """Models that take two GPUs."""
    steps = _steps(result, "large")
    steps["keeps"] = steps["way"].str.removeprefix("fsdp, ")
    columns = {"model": "{model}", **CONTEXT, "keeps": "{keeps}", **SPEED, **MFU, **MEMORY}
    return _table(steps, columns)


def context_table(result: Row) -> str:
    """One sequence a step on one GPU, and on two that share it."""
    both = _one_and_two(_steps(result, "context"), "context_length", "way", "attention")
    peaks = {"peak, one / two": "{peak_gib_base:.1f} / {peak_gib:.1f} GiB"}
    columns = {**CONTEXT, **ATTENTION, **ONE_AND_TWO, "faster": "{times:.2f}", **peaks}
    return _table(both, columns)


def long_table(result: Row) -> str:
    """How long two GPUs go."""
    steps = _steps(result, "long")
    columns = {**CONTEXT, **ATTENTION, **STEP, **SPEED, **MFU, **MEMORY}
    return _table(steps.query("n_gpus == 2"), columns)


def longest_table(result: Row) -> str:
    """The longest contexts that were tried, near all of a GPU's memory."""
    columns = {"GPUs": "{n_gpus}", **CONTEXT, "a step": "{step_s:.1f} s", **MEMORY}
    return _table(_steps(result, "longest"), columns)


def predicted_table(result: Row) -> str:
    """Step time of two GPUs, measured and as one GPU's times predict it."""
    steps = _steps(result, "long")
    growths, two = _growths(steps), steps.query("n_gpus == 2")
    lengths = zip(two["attention"], two["context_length"], strict=True)
    two = two.assign(predicted_s=[growths[mask].seconds(length, 2) for mask, length in lengths])
    two["off"] = two["predicted_s"] / two["step_s"] - 1
    predicted = {"predicted": "{predicted_s:.3g} s", "off by": "{off:+.1%}"}
    return _table(two, CONTEXT | ATTENTION | STEP | predicted)


def draw(result: Row) -> Figure:
    """Memory of a GPU and speed by length: measured on one and two, predicted for more."""
    steps = _steps(result, "long")
    growths = _growths(steps)
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    memory, speed = figure.subplots(1, 2)
    lengths = [2**n for n in range(16, 26)]
    looks = dict(zip(N_GPUS, COLOURS, strict=False))
    for n_gpus, colour in looks.items():
        told = {
            n: long_case("long", n, "dense", n_gpus, "selective").told_gib
            for n in lengths
            if n >= RING_LEAST_TOKENS * n_gpus
        }
        memory.plot([*told], [*told.values()], color=colour, linewidth=1)
        fits = [n for n, gib in told.items() if gib <= CARD]
        for mask, growth in growths.items():
            speed.plot(
                fits, [n / growth.seconds(n, n_gpus) for n in fits],
                color=colour, linewidth=1, linestyle="-" if mask == "dense" else "--",
                label=f"{n_gpus} GPU{'s' * (n_gpus > 1)}" if mask == "dense" else None,
            )  # fmt: skip
    for n_gpus, attention in product(looks, MASKS):
        some = steps.query("n_gpus == @n_gpus and attention == @attention")
        dots = {"marker": "o" if attention == "dense" else "s", "color": looks[n_gpus], "ls": ""}
        memory.plot(some["context_length"], some["peak_gib"], **dots)
        speed.plot(some["context_length"], some["tokens_per_s"], **dots)
    memory.axhline(CARD, color=PLAIN, linewidth=0.8)
    memory.set(ylabel="GiB of a GPU", ylim=(1, 300))
    speed.set(ylabel="tokens a second, all GPUs")
    figure.legend(
        frameon=False, loc="outside upper center", ncols=len(N_GPUS),
        title="measured: dense round, butterfly square; foretold: dense solid, butterfly dashed",
    )  # fmt: skip
    memory.text(lengths[0], 1.1 * CARD, "an H200", color=PLAIN)
    for axes in (memory, speed):
        axes.set(xscale="log", yscale="log", xlabel="tokens of context")
        axes.set_xticks(lengths[::2], [_short(n) for n in lengths[::2]])
        axes.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _short(n_tokens: int) -> str:
    return f"{n_tokens >> 20}M" if n_tokens >= 2**20 else f"{n_tokens >> 10}K"


def _growths(steps: pd.DataFrame) -> dict[str, Growth]:
    """By mask, from the steps of one GPU."""
    models = {mask: ModelConfig(positions="rotary", mask=config) for mask, config in MASKS.items()}
    alone = steps.loc[steps["n_gpus"] == 1, ["attention", "context_length", "step_s"]]
    return fit(models, [*alone.itertuples(index=False, name=None)])
