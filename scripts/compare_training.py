"""Train the same GPT on our attention and on PyTorch's, and see whether the losses are the same.

python -m scripts.compare_training configs/gpt2_small_1k.yaml --name gpt2_small_1k key=value ...

Three runs of train.py with one seed and run.deterministic=false: Triton, SDPA, and SDPA again. Left
to itself, PyTorch adds some gradients in an order that varies, so the two SDPA runs drift apart:
that is the noise, and the Triton run must stay as close to the first as the second does. Runs that
were begun before go on, and finished ones are not trained again.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from configs import TrainConfig, load_config, to_yaml
from configs.command_line import errors_as_sentences
from data.shards import Manifest
from scripts.results import write_result
from training.metrics import read_metrics

RUNS = {"triton": "triton", "sdpa": "sdpa", "sdpa again": "sdpa"}
SKIPPED = 3  # records of the speed that are left out: compiling, and clocks that still rise


def train_all(config: str, overrides: Sequence[str], folder: Path) -> dict[str, Path]:
    """Run train.py for each contender, as a user would; returns their folders.

    Raises:
        ValueError: a folder holds a run with other settings.
    """
    folders = {name: folder / name.replace(" ", "_") for name in RUNS}
    arguments = {
        name: [
            config,
            *overrides,
            "run.deterministic=false",
            f"model.attention={RUNS[name]}",
            f"run.out_dir={out}",
        ]
        for name, out in folders.items()
    }
    for name, out in folders.items():
        check_same_settings(out, load_config(arguments[name]))
    for name in RUNS:
        print(f"\n{name}: train.py {' '.join(arguments[name])}\n", flush=True)
        subprocess.run([sys.executable, "train.py", *arguments[name]], check=True)
    return folders


def check_same_settings(run: Path, config: TrainConfig) -> None:
    """Refuse to take a run for one of `config` that was begun with other settings."""
    begun = run / "config.yaml"
    if begun.exists() and begun.read_text(encoding="utf-8") != to_yaml(config):
        raise ValueError(
            f"{run} holds a run with other settings (compare {begun}): remove it, or choose "
            "another --name"
        )


def compare(folders: dict[str, Path]) -> dict[str, Any]:
    """Curves, speeds and distances of the runs."""
    records = {name: read_metrics(folder) for name, folder in folders.items()}
    curves = {
        name: [(r["tokens"], r["loss"]) for r in rows if "loss" in r]
        for name, rows in records.items()
    }
    evaluations = {name: [r for r in rows if "val_loss" in r] for name, rows in records.items()}
    trained = {name: [r for r in rows if "loss" in r] for name, rows in records.items()}

    def distance(name: str) -> dict[str, float]:
        """From the first SDPA run: mean and largest gap of the curves, and the final gap."""
        gaps = [abs(a[1] - b[1]) for a, b in zip(curves[name], curves["sdpa"], strict=True)]
        return {
            "mean": mean(gaps),
            "largest": max(gaps),
            "final_validation": abs(
                evaluations[name][-1]["val_loss"] - evaluations["sdpa"][-1]["val_loss"]
            ),
        }

    return {
        "runs": {
            name: {
                "tokens": curves[name][-1][0],
                "final_training_loss": mean(loss for _, loss in curves[name][-10:]),
                "validation_loss": evaluations[name][-1]["val_loss"],
                "validation_perplexity": evaluations[name][-1]["val_perplexity"],
                "validation_tokens": evaluations[name][-1]["val_tokens"],
                "tokens_per_s": median(r["tokens_per_s"] for r in trained[name][SKIPPED:]),
                "mfu_causal": median(r.get("mfu_causal", 0) for r in trained[name][SKIPPED:]),
                "mfu_full": median(r.get("mfu_full", 0) for r in trained[name][SKIPPED:]),
                "memory_gib": max(r.get("memory_gib", 0) for r in trained[name]),
                "curve": curves[name],
                "validation_curve": [(r["tokens"], r["val_loss"]) for r in evaluations[name]],
            }
            for name in records
        },
        "distance_from_sdpa": {name: distance(name) for name in ("triton", "sdpa again")},
    }


def draw(result: dict[str, Any], out: Path, title: str) -> None:
    """The three curves, and below them their distance from the first SDPA run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    styles = {"sdpa": ("C0", "-"), "sdpa again": ("C2", "--"), "triton": ("C1", "-")}
    base = [loss for _, loss in result["runs"]["sdpa"]["curve"]]
    for name, (colour, line) in styles.items():
        tokens = [t / 1e6 for t, _ in result["runs"][name]["curve"]]
        losses = [loss for _, loss in result["runs"][name]["curve"]]
        label = "Triton (ours)" if name == "triton" else name.replace("sdpa", "SDPA (PyTorch)")
        top.plot(tokens, losses, color=colour, ls=line, lw=1.2, label=label)
        if name != "sdpa":
            gaps = [a - b for a, b in zip(losses, base, strict=True)]
            bottom.plot(tokens, gaps, color=colour, ls=line, lw=1, label=f"{label} - SDPA")
    top.set_title(title)
    top.set_ylabel("training loss, nats per token")
    bottom.set_ylabel("difference, nats")
    bottom.set_xlabel("tokens seen, millions")
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(out, dpi=120)
    print(f"drew {out}")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.compare_training",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", help="YAML file of the runs")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values to replace")
    parser.add_argument("--name", required=True, help="of the result and of the runs' folder")
    parser.add_argument("--runs", type=Path, default=Path("out/compare_training"))
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    args = parser.parse_intermixed_args(argv)
    folders = train_all(args.config, args.overrides, args.runs / args.name)
    config = load_config([args.config, *args.overrides])
    corpus = Manifest.load(Path(config.data.path))
    tokens = {split: info.tokens for split, info in corpus.splits.items()}
    result = {"corpus_tokens": tokens, **compare(folders)}
    path = args.out / f"compare_training_{args.name}.json"
    write_result(path, result)
    draw(result, path.with_suffix(".png"), f"{args.name}: attention in Triton and in PyTorch")
    print(json.dumps({**result, "runs": None}, indent=1))
    for name, run in result["runs"].items():
        print(
            f"{name:11} validation loss {run['validation_loss']:.4f}  "
            f"{run['tokens_per_s']:,.0f} tokens/s  {run['memory_gib']:.1f} GiB"
        )


if __name__ == "__main__":
    with errors_as_sentences():
        main()
