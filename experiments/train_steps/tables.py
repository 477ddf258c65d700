"""The tables of training steps in README.md and docs."""

from collections.abc import Mapping
from typing import Any

from experiments.reports import table

Result = Mapping[str, Any]


def speed_table(result: Result) -> str:
    """Speed and memory of a training step, of `experiments.train_steps.speed`."""
    rows = result["rows"]
    peer = {r["context_length"]: r["tokens_per_s"] for r in rows if r["name"] == "nanoGPT, flash"}

    def line(row: Mapping[str, Any]) -> dict[str, str]:
        base, mfu = peer.get(row["context_length"]), row["mfu"]
        shares = f"{mfu['causal']:.1%} / {mfu['full']:.1%}" if mfu else "unknown GPU"
        return {
            "context": f"{row['context_length']:,}",
            "attention": row["name"],
            "tokens/s": f"{row['tokens_per_s']:,.0f}",
            "x nanoGPT, flash": f"{row['tokens_per_s'] / base:.2f}" if base else "-",
            "MFU, causal / full": shares,
            "peak": f"{row['peak_gib']:.1f} GiB",
        }

    return table(map(line, rows))


def losses_table(**results: Result) -> str:
    """Runs on our attention and PyTorch's, of `experiments.train_steps.same_losses`, by context."""
    return table(
        {
            "context": context,
            "run": run.replace("triton", "ours, triton").replace("sdpa", "PyTorch, SDPA"),
            "validation loss": f"{values['validation_loss']:.4f}",
            "tokens/s": f"{values['tokens_per_s']:,.0f}",
            "MFU, causal / full": f"{values['mfu_causal']:.1%} / {values['mfu_full']:.1%}",
            "peak": f"{values['memory_gib']:.1f} GiB",
        }
        for context, result in results.items()
        for run, values in result["runs"].items()
    )


def gaps_table(**results: Result) -> str:
    """Distances between runs that share an attention, and between runs that do not."""

    def gap(result: Result, kind: str, what: str) -> str:
        found = result["distances"][kind]
        return f"{found[what]:.4f} ({found['pairs']} pair{'s' * (found['pairs'] != 1)})"

    return table(
        {
            "context": context,
            "gap, nats": title,
            "on the same attention": gap(result, "same", what),
            "on ours and PyTorch's": gap(result, "different", what),
        }
        for context, result in results.items()
        for what, title in (("curve", "training curve, mean"), ("validation", "validation, final"))
    )
