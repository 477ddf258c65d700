"""Provenance of each result (device, versions, commits, dates): the table of docs/reproduce.md."""

from collections.abc import Mapping
from typing import Any

from evaluation.markdown import dict_table
from evaluation.results import Row

RESULTS = (
    "table4_billion", "table4_hours", "table4_minutes", "table4_minutes_131k",
    "evaluation_long_ppl/evaluation",
    "repeats", "repeats_minutes_131k_1k", "repeats_1k", "repeats_billion",
    "recipe", "recipe_step", "table4_recipe_sizes", "table4_recipe_131k",
    "table4_recipe_held_out",
    "recipe_removed", "recipe_first", "recipe_first_step",
    "time_to_loss", "table4_modern", "passkey", "long_documents", "long_documents_gpt_frozen",
    "long_documents_imported", "long_documents_frozen", "long_documents_baselines",
    "long_documents_last_state", "long_documents_imported_last_state",
    "pathx", "lra", "lra_rotary", "lra_pretrained", "lra_speed", "lra_speed_approximate",
    "pathfinder_baselines", "pathfinder_tracing", "pathfinder_tracing_32", "pathfinder_speed",
    "compare_training_gpt2_small_1k", "compare_training_gpt2_small_4k", "train_speed",
    "train_speed_butterfly", "transformers_step", "registered_step", "first_step",
    "bert_step_padded", "bert_step_full", "saving", "reliability",
    "scale", "scale_muon", "scale_context", "scale_long", "scale_longest", "scale_losses",
    "attention_peers", "attention_hopper", "attention_features", "attention_host",
    "attention_butterfly", "attention_blocks", "attention_paper", "attention_approximate",
    "attention_sparsity", "attention_io",
)  # fmt: skip


def provenance_table(**results: Mapping[str, Any]) -> str:
    """One row per result; for trained runs, the environments in which they started."""
    return dict_table(_line(name, result) for name, result in results.items())


def _line(name: str, result: Mapping[str, Any]) -> dict[str, str]:
    runs: list[Row] = [
        run.get("about", run) for run in result.get("runs", ()) if isinstance(run, dict)
    ]
    environments = [start for run in runs for start in run["starts"]] or [result["environment"]]

    def distinct(field: str) -> str:
        """Distinct values of a field in all environments."""
        return ", ".join(sorted({env[field] for env in environments if env[field]}))

    return {
        "result": f"[{name}.json](results/{name}.json)",
        "device": distinct("device").replace("x86_64", "") or "a CPU",
        "torch": distinct("torch"),
        "triton": distinct("triton"),
        "commits": distinct("commit"),
        "date": distinct("date"),
        "runs": str(len(runs) or ""),
        "training minutes": f"{sum(map(_minutes, runs)):.0f}" if runs else "",
    }


def _minutes(run: Row) -> float:
    """GPU-minutes of a run; its part of them if it shared the GPU."""
    if "seconds" in run:
        return run["seconds"] / 60
    return run.get("minutes") or 60 * run["gpu_hours"] / (run.get("jobs_per_gpu") or 1)
