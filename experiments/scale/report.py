"""Tables and pictures of steps on several GPUs."""

from collections.abc import Iterable, Iterator
from typing import Any

from evaluation.results import Row
from experiments.reports import table


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
            "a step": f"{row['step_s']:.1f} s",
            "tokens/s": f"{row['tokens_per_s']:,.0f}",
            "MFU, causal / full": _mfu(row),
            **_memory(row),
        }
        for row in _of(result, "long")
    )


def _memory(row: Row) -> dict[str, str]:
    return {
        "peak": f"{row['peak_gib']:.1f} GiB",
        "--dry-run": f"{row['told_gib']:.1f} GiB, {row['told_gib'] / row['peak_gib'] - 1:+.0%}",
    }


def _mfu(row: Row) -> str:
    used = row["mfu"]
    return "-" if used is None else f"{used['causal']:.1%} / {used['full']:.1%}"
