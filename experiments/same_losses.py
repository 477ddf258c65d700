"""Compare training losses across attention implementations, and across parallelism.

python -m experiments.same_losses attention CONFIG --name NAME ...
python -m experiments.same_losses sharing data.path=out/data/openwebtext

`attention` trains several runs on Papilio's attention and on PyTorch's, all from one seed and with
run.deterministic=false. In that mode, PyTorch sums some gradients in a varying order, so
equal runs drift apart. That distance is the noise: runs on different attention must not be further
apart.

`sharing` trains four layers of GPT-2 small for 50 steps on the same samples, at a context of 8,192
with a document mask: on one GPU, and on two with each kind of parallelism. One GPU with other
micro-batches computes the same sums in another order. Its distance is the noise of the order, the
reference for the others. The data must be prepared with GPT-2's tokenizer.

All runs use train.py. An interrupted run is resumed, and a finished one is not trained again.
"""

from argparse import Namespace
from pathlib import Path

from experiments.harness import Command, Result, write_and_print

FSDP, FLOAT32 = "parallel.mode=fsdp", "parallel.gather_dtype=float32"
CONTEXT, BUTTERFLY = "parallel.context=2", "model.mask.pattern=butterfly"
# Settings of each configuration; all run on two GPUs unless the name says one
WAYS: dict[str, list[str]] = {
    "one GPU": [],
    "one GPU, other micro-batches": ["optim.micro_batch_size=1"],
    "ddp": [],
    "fsdp, float32": [FSDP, FLOAT32],
    "fsdp": [FSDP],
    "context": [CONTEXT],
    "context and fsdp, float32": [CONTEXT, FSDP, FLOAT32],
    "one GPU, butterfly": [BUTTERFLY],
    "context, butterfly": [BUTTERFLY, CONTEXT],
}
STEPS = 50
SETTINGS = [
    *("configs/paper/gpt2_small_8k.yaml", "model.n_layer=4"),
    *("model.dropout=0", "model.attention_dropout=0"),
    *("data.document_mask=true", "optim.batch_tokens=65536", "optim.micro_batch_size=2"),
    # a low learning rate avoids loss spikes, which amplify every difference
    *(f"optim.max_steps={STEPS}", "optim.warmup_steps=20", "optim.lr=2e-4", "run.log_every=1"),
    *(f"run.eval_every={STEPS}", f"run.save_every={STEPS}"),
]


def check(args: Namespace) -> None:
    """Reject a comparison without a name, or without a noise estimate."""
    if args.comparison == "attention" and not args.name:
        raise ValueError("attention needs --name, the name of the result and of the runs' folder")
    if args.ours < 1 or args.sdpa < 2:
        raise ValueError(
            f"--ours={args.ours} must be at least 1 and --sdpa={args.sdpa} at least 2: the noise "
            "is the distance of two equal runs"
        )


command = Command(__name__)
add = command.add
add("comparison", choices=["attention", "sharing"])
add("arguments", nargs="*", help="arguments of train.py for all runs: FILE key=value ...")
add("--name", help="attention: name of the result and of the runs' folder")
add(
    "--ours",
    type=int,
    default=2,
    metavar="N",
    help="attention: number of runs on Papilio's attention",
)
add(
    "--sdpa",
    type=int,
    default=2,
    metavar="N",
    help="attention: number of runs on PyTorch's, at least 2",
)
add(
    "--ways",
    nargs="+",
    choices=[*WAYS],
    default=[*WAYS],
    help="sharing: configurations; the first must be one GPU",
)
add("--runs", type=Path, default=Path("out/same_losses"))
add("--out", type=Path, default=Path("docs/results"), help="folder of the result")
command.read(check=check)

import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import combinations
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from data.text.shards import Manifest
from evaluation.markdown import dict_table
from evaluation.results import Row
from evaluation.runs import check_same_settings
from experiments.train_steps.tables import draw_losses, gaps_table, losses, losses_table
from training.language.config import load_config
from training.metrics import read_metrics

ATTENTION = {"ours": "auto", "sdpa": "sdpa"}  # values of model.attention
SKIPPED = 3  # first speed records to ignore: compilation, and clocks that are not settled


class Run(NamedTuple):
    """One run of train.py; `launcher` has the arguments of Python before it."""

    folder: Path
    settings: list[str]
    launcher: tuple[str, ...] = ()


def train_all(runs: Mapping[str, Run]) -> None:
    """Train all unfinished runs with train.py.

    Raises:
        ValueError: a folder holds a run with other settings.
    """
    commands = {}
    for name, (folder, settings, launcher) in runs.items():
        arguments = [*settings, f"run.out_dir={folder}"]
        config = load_config(arguments)
        check_same_settings(folder, config)
        last = config.optim.max_steps
        if not any("val_loss" in r and r["step"] == last for r in read_metrics(folder)):
            commands[name] = [*launcher, "train.py", *arguments]
    for name, command in commands.items():
        print(f"\n{name}: {' '.join(command)}\n", flush=True)
        subprocess.run([sys.executable, *command], check=True)


# ---- attention


def attention_runs(
    arguments: Sequence[str], folder: Path, repeats: Mapping[str, int]
) -> dict[str, Run]:
    """Build the runs on each attention, by "IMPL NUMBER"."""
    return {
        f"{impl} {number}": Run(
            folder / f"{impl}_{number}",
            [*arguments, "run.deterministic=false", f"model.attention={attention}"],
        )
        for impl, attention in ATTENTION.items()
        for number in range(1, repeats[impl] + 1)
    }


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
    """Mean distances between pairs of runs on the "same" and on "different" attention, nats.

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


def compare_attention(args: Namespace) -> None:
    """Train on Papilio's attention and on PyTorch's; write and draw losses and distances."""
    repeats = {"ours": args.ours, "sdpa": args.sdpa}
    runs = attention_runs(args.arguments, args.runs / args.name, repeats)
    train_all(runs)
    summaries = {name: summarise(run.folder) for name, run in runs.items()}
    corpus = Manifest.load(Path(load_config(args.arguments).data.path))
    tokens = {split: info.tokens for split, info in corpus.splits.items()}
    result = {"corpus_tokens": tokens, "distances": distances(summaries), "runs": summaries}

    def tables(result: Result) -> str:
        named = {args.name: result}
        return f"{losses_table(**named)}\n{gaps_table(**named)}"

    path = args.out / f"compare_training_{args.name}.json"
    write_and_print(path, result, tables, partial(draw_losses, name=args.name))


# ---- sharing


def sharing_runs(ways: Sequence[str], arguments: Sequence[str], folder: Path) -> dict[str, Run]:
    """Build one run per configuration, by name."""
    torchrun = "-m", "torch.distributed.run", "--standalone"
    return {
        way: Run(
            folder / way.replace(", ", "_").replace(" ", "_"),
            [*SETTINGS, *WAYS[way], *arguments],
            (*torchrun, f"--nproc_per_node={1 if way.startswith('one GPU') else 2}"),
        )
        for way in ways
    }


def gaps(losses: dict[str, list[float]]) -> list[Row]:
    """Mean and largest gap over steps to one GPU with the same mask, nats, per configuration."""
    rows = []
    for way, curve in losses.items():
        base = "one GPU, butterfly" if "butterfly" in way else "one GPU"
        if way != base:
            gap = np.abs(np.subtract(curve, losses[base]))
            rows.append({"way": way, "mean": gap.mean().item(), "most": gap.max().item()})
    return rows


def sharing_table(result: Result) -> str:
    """Markdown table of the gap of each configuration to one GPU, in thousandths of a nat."""
    return dict_table(
        {
            "configuration": row["way"].replace("context", "context parallel"),
            "mean gap, mnat": f"{1e3 * row['mean']:.2f}",
            "largest gap, mnat": f"{1e3 * row['most']:.2f}",
        }
        for row in result["gaps"]
    )


def compare_sharing(args: Namespace) -> None:
    """Train each configuration; write losses and gaps."""
    runs = sharing_runs(args.ways, args.arguments, args.runs / "sharing")
    train_all(runs)
    curves = {
        way: [record["loss"] for record in read_metrics(run.folder) if "loss" in record]
        for way, run in runs.items()
    }
    result = {"steps": STEPS, "losses": curves, "gaps": gaps(curves)}
    write_and_print(args.out / "scale_losses.json", result, sharing_table)


@command.main
def main(args: Namespace) -> None:
    """Compare attention implementations or kinds of parallelism."""
    compare = compare_attention if args.comparison == "attention" else compare_sharing
    compare(args)
