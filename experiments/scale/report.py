"""Tables and pictures of steps on several GPUs."""

from collections.abc import Iterable, Iterator
from typing import Any

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


def _of(result: Row, part: str) -> list[Row]:
    return [row for row in result["rows"] if row["part"] == part]


def _like(rows: Iterable[Row], **values: Any) -> Row | None:
    """The first of the rows that has these values."""
    return next((r for r in rows if all(r[k] == v for k, v in values.items())), None)


def ddp_table(result: Row) -> str:
    """Tokens a second of one GPU and of two, and what that is of twice as much."""

    def lines() -> Iterator[dict[str, str]]:
        rows = _of(result, "ddp")
        for two in (row for row in rows if row["n_gpus"] == 2):
            context, tokens = two["context_length"], two["batch_tokens"]
            one = _like(rows, n_gpus=1, context_length=context, batch_tokens=tokens // 2)
            if one is None:
                continue
            micro_batches = tokens // 2 // (two["micro_batch_size"] * context)
            yield {
                "context": f"{context:,}",
                "micro-batches a step": str(micro_batches),
                "one GPU, tokens/s": f"{one['tokens_per_s']:,.0f}",
                "two": f"{two['tokens_per_s']:,.0f}",
                "of twice one": f"{two['tokens_per_s'] / (2 * one['tokens_per_s']):.1%}",
            }

    return table(lines())


def fsdp_table(result: Row) -> str:
    """GPT-2 medium: tokens a second and memory of sharing out, against ddp."""
    rows = _of(result, "fsdp")
    return table(
        {
            "context": f"{row['context_length']:,}",
            "weights": row["way"],
            "tokens/s": f"{row['tokens_per_s']:,.0f}",
            "of ddp": f"{row['tokens_per_s'] / ddp['tokens_per_s']:.1%}",
            **_memory(row),
        }
        for row in rows
        if (ddp := _like(rows, context_length=row["context_length"], way="ddp")) is not None
    )


def large_table(result: Row) -> str:
    """Models that take two GPUs."""
    return table(
        {
            "model": row["model"],
            "context": f"{row['context_length']:,}",
            "keeps": row["way"].removeprefix("fsdp, "),
            "tokens/s": f"{row['tokens_per_s']:,.0f}",
            "MFU, causal / full": _mfu(row),
            **_memory(row),
        }
        for row in _of(result, "large")
    )


def context_table(result: Row) -> str:
    """One sequence a step on one GPU, and on two that share it."""
    rows = _of(result, "context")
    return table(
        {
            "context": f"{two['context_length']:,}",
            "attention": two["way"].partition(",")[0],
            "one GPU, tokens/s": f"{one['tokens_per_s']:,.0f}",
            "two": f"{two['tokens_per_s']:,.0f}",
            "faster": f"{two['tokens_per_s'] / one['tokens_per_s']:.2f}",
            "peak, one / two": f"{one['peak_gib']:.1f} / {two['peak_gib']:.1f} GiB",
        }
        for two in rows
        if two["n_gpus"] == 2
        and (one := _like(rows, n_gpus=1, **{k: two[k] for k in ("context_length", "way")}))
    )


def long_table(result: Row) -> str:
    """How long two GPUs go."""
    return table(
        {
            "context": f"{row['context_length']:,}",
            "attention": row["way"].partition(",")[0],
            "a step": f"{row['step_s']:.3g} s",
            "tokens/s": f"{row['tokens_per_s']:,.0f}",
            "MFU, causal / full": _mfu(row),
            **_memory(row),
        }
        for row in _of(result, "long")
        if row["n_gpus"] == 2
    )


def longest_table(result: Row) -> str:
    """The longest contexts that were tried, near all of a GPU's memory."""
    return table(
        {
            "GPUs": str(row["n_gpus"]),
            "context": f"{row['context_length']:,}",
            "a step": f"{row['step_s']:.1f} s",
            **_memory(row),
        }
        for row in _of(result, "longest")
    )


def foretold_table(result: Row) -> str:
    """What two GPUs take for a step, and what the model of one tells of it."""
    rows = _of(result, "long")
    return table(
        {
            "context": f"{row['context_length']:,}",
            "attention": mask,
            "a step": f"{row['step_s']:.3g} s",
            "foretold": f"{(told := growth.seconds(row['context_length'], 2)):.3g} s",
            "off by": f"{told / row['step_s'] - 1:+.1%}",
        }
        for mask, growth in _growths(rows).items()
        for row in rows
        if row["n_gpus"] == 2 and row["way"].startswith(f"{mask},")
    )


def draw(result: Row) -> Figure:
    """Memory of a GPU and speed by length: measured on one and two, foretold for more."""
    rows = _of(result, "long")
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
        for mask, growth in _growths(rows).items():
            speed.plot(
                fits, [n / growth.seconds(n, n_gpus) for n in fits],
                color=colour, linewidth=1, linestyle="-" if mask == "dense" else "--",
                label=f"{n_gpus} GPU{'s' * (n_gpus > 1)}" if mask == "dense" else None,
            )  # fmt: skip
    for row in rows:
        dot = {
            "marker": "o" if row["way"].startswith("dense,") else "s",
            "color": looks[row["n_gpus"]],
        }
        memory.plot(row["context_length"], row["peak_gib"], **dot)
        speed.plot(row["context_length"], row["tokens_per_s"], **dot)
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


def _growths(rows: list[Row]) -> dict[str, Growth]:
    """By mask, from the rows of one GPU."""
    models = {mask: ModelConfig(positions="rotary", mask=config) for mask, config in MASKS.items()}
    alone = [
        (row["way"].partition(",")[0], row["context_length"], row["step_s"])
        for row in rows
        if row["n_gpus"] == 1
    ]
    return fit(models, alone)


def _memory(row: Row) -> dict[str, str]:
    peak, told = row["peak_gib"], case_of(row).told_gib
    return {"peak": f"{peak:.1f} GiB", "--dry-run": f"{told:.1f} GiB, {told / peak - 1:+.0%}"}


def _mfu(row: Row) -> str:
    used = row["mfu"]
    return "-" if used is None else f"{used['causal']:.1%} / {used['full']:.1%}"
