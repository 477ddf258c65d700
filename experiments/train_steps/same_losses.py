"""Train the same GPT on our attention and on PyTorch's, and see whether the losses are the same.

python -m experiments.train_steps.same_losses configs/gpt2_small_1k.yaml --name gpt2_small_1k ...

Several runs of train.py for each, all from one seed and with run.deterministic=false. Left to
itself, PyTorch adds some gradients in an order that varies, so equal runs drift apart: that is the
noise, and runs on different attention must lie no further apart. What was begun before goes on, and
a finished run is not trained again.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from training.command_line import command_parser, errors_as_sentences, read_first


@read_first
def options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """What the command line says."""
    parser = command_parser(__doc__, __spec__)
    add = parser.add_argument
    add("config", help="YAML file of the runs")
    add("overrides", nargs="*", metavar="key=value", help="values to replace")
    add("--name", required=True, help="of the result and of the runs' folder")
    add("--ours", type=int, default=2, metavar="N", help="runs on our attention")
    add("--sdpa", type=int, default=2, metavar="N", help="on PyTorch's; 2 or more")
    add("--runs", type=Path, default=Path("out/compare_training"))
    add("--out", type=Path, default=Path("docs/results"))
    args = parser.parse_intermixed_args(argv)
    if args.ours < 1 or args.sdpa < 2:
        parser.error(
            f"--ours={args.ours} must be 1 or more and --sdpa={args.sdpa} 2 or more: without "
            "two equal runs the noise is unknown"
        )
    return args


import subprocess
import sys
from itertools import combinations
from statistics import median
from typing import Any

import numpy as np

from data.text.shards import Manifest
from evaluation.results import write_result
from evaluation.runs import check_same_settings
from evaluation.style import save
from experiments.train_steps.tables import draw_losses, gaps_table, losses, losses_table
from training.language.config import TrainConfig, load_config
from training.metrics import read_metrics

ATTENTION = {"ours": "auto", "sdpa": "sdpa"}  # of model.attention
SKIPPED = 3  # records of the speed that are left out: compiling, and clocks that still rise


def train_all(
    config: str, overrides: Sequence[str], folder: Path, repeats: dict[str, int]
) -> dict[str, Path]:
    """Run train.py for each contender, as a user would; returns the folders by "IMPL NUMBER".

    Raises:
        ValueError: a folder holds a run with other settings.
    """
    folders, arguments = {}, {}
    for impl, attention in ATTENTION.items():
        for number in range(1, repeats[impl] + 1):
            name = f"{impl} {number}"
            folders[name] = folder / f"{impl}_{number}"
            arguments[name] = [
                config,
                *overrides,
                "run.deterministic=false",
                f"model.attention={attention}",
                f"run.out_dir={folders[name]}",
            ]
            check_same_settings(folders[name], load_config(arguments[name]))
    for name, out in folders.items():
        if not is_finished(out, load_config(arguments[name])):
            print(f"\n{name}: train.py {' '.join(arguments[name])}\n", flush=True)
            subprocess.run([sys.executable, "train.py", *arguments[name]], check=True)
    return folders


def is_finished(run: Path, config: TrainConfig) -> bool:
    """Whether the last evaluation of a run is there."""
    return any("val_loss" in r and r["step"] == config.optim.max_steps for r in read_metrics(run))


def summarise(run: Path) -> dict[str, Any]:
    """Losses, speed and memory of one run."""
    records = read_metrics(run)
    trained = [r for r in records if "loss" in r]
    evaluated = [r for r in records if "val_loss" in r]
    timed = trained[SKIPPED:]
    return {
        "tokens": trained[-1]["tokens"],
        "validation_loss": evaluated[-1]["val_loss"],
        "validation_perplexity": evaluated[-1]["val_perplexity"],
        "validation_tokens": evaluated[-1]["val_tokens"],
        "tokens_per_s": median(r["tokens_per_s"] for r in timed if "tokens_per_s" in r),
        "mfu_causal": median(r.get("mfu_causal", 0) for r in timed),
        "mfu_full": median(r.get("mfu_full", 0) for r in timed),
        "memory_gib": max(r.get("memory_gib", 0) for r in trained),
        "curve": [[r["tokens"], r["loss"]] for r in trained],
        "validation_curve": [[r["tokens"], r["val_loss"]] for r in evaluated],
    }


def distances(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Distances between runs, nats: on "same" attention and on "different"; means over pairs.

    curve: mean gap of the training losses. validation: gap of the final validation losses.
    """
    pairs: dict[str, list[tuple[float, float]]] = {"same": [], "different": []}
    for (a, run_a), (b, run_b) in combinations(runs.items(), 2):
        kind = "same" if a.split()[0] == b.split()[0] else "different"
        curve = np.abs(losses(run_a) - losses(run_b)).mean()
        pairs[kind].append((curve, abs(run_a["validation_loss"] - run_b["validation_loss"])))
    result = {}
    for kind, gaps in pairs.items():
        curve, validation = np.mean(gaps, axis=0).tolist()
        result[kind] = {"pairs": len(gaps), "curve": curve, "validation": validation}
    return result


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    args = options(argv)
    repeats = {"ours": args.ours, "sdpa": args.sdpa}
    folders = train_all(args.config, args.overrides, args.runs / args.name, repeats)
    runs = {name: summarise(folder) for name, folder in folders.items()}
    corpus = Manifest.load(Path(load_config([args.config, *args.overrides]).data.path))
    path = args.out / f"compare_training_{args.name}.json"
    result = {
        "corpus_tokens": {split: info.tokens for split, info in corpus.splits.items()},
        "distances": distances(runs),
        "runs": runs,
    }
    write_result(path, result)
    save(draw_losses(result, args.name), path.with_suffix(".png"))
    print(losses_table(**{args.name: result}))
    print(gaps_table(**{args.name: result}))
    print(f"wrote {path} and its picture")


if __name__ == "__main__":
    with errors_as_sentences():
        main()
