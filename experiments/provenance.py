"""Where, when and with what each result was measured: the table of docs/reproduce.md."""

from collections.abc import Mapping
from typing import Any

from evaluation.results import Row
from experiments.reports import table

RESULTS = (
    "table4_hours", "table4_minutes", "table4_modern", "passkey",
    "pathx", "lra", "lra_rotary", "lra_pretrained", "lra_speed",
    "pathfinder_yardsticks", "pathfinder_tracing", "pathfinder_tracing_32", "pathfinder_speed",
    "compare_training_gpt2_small_1k", "compare_training_gpt2_small_4k", "train_speed",
    "train_speed_butterfly", "transformers_step", "first_step",
    "saving", "reliability",
    "scale", "scale_context", "scale_long", "scale_longest", "scale_losses",
    "attention_peers", "attention_hopper", "attention_features", "attention_host",
    "attention_butterfly", "attention_blocks", "attention_paper", "attention_sparsity",
    "attention_io",
)  # fmt: skip


def provenance_table(**results: Mapping[str, Any]) -> str:
    """A line for each result by its name; of runs that were trained, where they started."""
    return table(_line(name, result) for name, result in results.items())


def _line(name: str, result: Mapping[str, Any]) -> dict[str, str]:
    runs: list[Row] = [run for run in result.get("runs", ()) if isinstance(run, dict)]
    places = [start for run in runs for start in run["starts"]] or [result["environment"]]

    def each(field: str) -> str:
        """What the places have there, once each."""
        return ", ".join(sorted({place[field] for place in places if place[field]}))

    return {
        "result": f"[{name}.json](results/{name}.json)",
        "on": each("device").replace("x86_64", "") or "a CPU",
        "torch": each("torch"),
        "triton": each("triton"),
        "commits": each("commit"),
        "date": each("date"),
        "runs": str(len(runs) or ""),
        "minutes of training": f"{sum(map(_minutes, runs)):.0f}" if runs else "",
    }


def _minutes(run: Row) -> float:
    return run.get("minutes") or 60 * run["gpu_hours"]
