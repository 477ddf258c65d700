"""Seconds of training that each recipe needs, on one GPU, for nanoGPT's loss after 10 minutes.

    python -m experiments.time_to_loss --data out/data/long_documents --nanogpt FOLDER
    python -m experiments.time_to_loss --data out/data/long_documents \\
      --steps recipe=900,1200,1800 4k=3000,4200

The first command trains GPT-2 small with the train.py of a checkout of karpathy/nanoGPT, on cuDNN
attention. The second trains Papilio with each number of steps of --steps, which names models of
experiments.table4. All take 32,768 tokens per step at a context of 4,096. nanoGPT has learned
positions, no biases and a cosine schedule, and the AdamW settings of Papilio's 4k. The rate ends
at 0 with each run, so each duration is a run of its own. The seconds are interpolated between a run
that misses nanoGPT's loss and one that reaches it.

Seconds are those of training steps, without compilation, evaluation and saving. For Papilio they
are the GPU-hours of metrics.jsonl: steps that compile or are captured count as the mean of those
after them. For nanoGPT they are the median time of an iteration, times the number of steps.
compile_s of nanoGPT is the first iteration of a run with empty caches, including an evaluation of
two batches.

Each run is added to --out when it is measured, and not measured again. An interrupted run of
Papilio resumes, and one of nanoGPT starts again. All runs must be on the same kind of device.
"""

from argparse import ArgumentTypeError, Namespace
from pathlib import Path

from experiments.harness import Command

MODELS = ("4k", "4k_learned", "recipe")
MIN_STEPS = 10


def steps_of(text: str) -> list[tuple[str, int]]:
    """Model and number of steps of each run in MODEL=N,N."""
    name, _, numbers = text.partition("=")
    if name not in MODELS or not all(n.isdecimal() for n in numbers.split(",")):
        raise ArgumentTypeError(
            f"{text!r} must be MODEL=STEPS,STEPS with a model of {', '.join(MODELS)}, such as "
            "recipe=1200,1800"
        )
    runs = [(name, int(number)) for number in numbers.split(",")]
    if too_few := [steps for _, steps in runs if steps < MIN_STEPS]:
        raise ArgumentTypeError(
            f"{text!r} has {too_few[0]} steps, which must be at least {MIN_STEPS}"
        )
    return runs


command = Command(__name__)
command.add("--data", type=Path, required=True, help="token shards to train on")
command.add(
    "--nanogpt", type=Path, metavar="FOLDER",
    help="checkout of nanoGPT; needed until its run is in --out",
)  # fmt: skip
command.add(
    "--steps", type=steps_of, nargs="+", default=[], metavar="MODEL=N,N",
    help=f"runs of Papilio to add; models: {', '.join(MODELS)}",
)  # fmt: skip
command.add("--runs", type=Path, default=Path("out/time_to_loss"), help="folder of the runs")
command.read(out="docs/results/time_to_loss.json")

from collections.abc import Sequence
from dataclasses import replace

from data.text.shards import Manifest
from evaluation.results import Row, read_result
from experiments.harness import Result, write_and_print
from experiments.table4.jobs import Job, make_jobs
from experiments.table4.models import BUDGETS
from experiments.time_to_loss import nanogpt
from experiments.time_to_loss.report import NANOGPT, answers_table, draw, runs_table
from training.environment import machine, read_starts
from training.metrics import read_evaluations


def make_job(name: str, steps: int, data: Path, runs: Path) -> Job:
    """Run of a model with the settings of the budget `minutes`, but another number of steps."""
    vocab_size = Manifest.load(data).tokenizer.vocab_size
    budget = replace(BUDGETS["minutes"], steps=steps)
    folder = runs / f"steps_{steps}"
    (job,) = make_jobs([name], budget, folder, data=data, vocab_size=vocab_size, seeds=1)
    return job


def train(job: Job) -> Row:
    """Train or resume a run, and describe it; a finished run is only described."""
    if not job.is_finished:
        nanogpt.run_alone(replace(job.task(), name=f"{job.name}, {job.folder.parent.name}"))
    curve = [
        {
            "steps": record["step"],
            "seconds": 3600 * record["gpu_hours"],
            "val_loss": record["val_loss"],
        }
        for record in read_evaluations(job.folder)
    ]
    last = curve[-1]
    return {
        "contender": job.name,
        **last,
        "tokens": last["steps"] * job.config.optim.batch_tokens,
        "compile_s": None,  # not in the metrics of a run
        "curve": curve,
        "starts": read_starts(job.folder),
    }


def check_devices(runs: Sequence[Row], place: Path) -> None:
    """Raise ValueError if one of the runs was not on the device of this machine."""
    here = machine()["device"]
    for run in runs:
        for start in run["starts"]:
            if start["device"] != here:
                raise ValueError(
                    f"{place} has a run of {run['contender']} on {start['device']}, but this "
                    f"machine has {here}, whose seconds cannot be compared. Use the same kind of "
                    "device, or another --out and --runs"
                )


def text_of(data: Path) -> dict[str, str | int]:
    """Description of a text, which must be the same for all runs."""
    manifest = Manifest.load(data)
    tokens = {f"{split}_tokens": info.tokens for split, info in manifest.splits.items()}
    return {"name": data.name, "tokenizer": manifest.tokenizer.sha256, **tokens}


def read_runs(path: Path, text: dict[str, str | int]) -> list[Row]:
    """Runs that were measured before; none if the file does not exist.

    Raises:
        ValueError: they are of another text or device.
    """
    if not path.exists():
        return []
    result = read_result(path, "text", "runs")
    if result["text"] != text:
        raise ValueError(
            f"--out={path} has runs on another text: {result['text']}, but --data is {text}. Use "
            "the same text, or another --out"
        )
    check_devices(result["runs"], path)
    return result["runs"]


def tables(result: Result) -> str:
    """Tables of the answers and of the runs."""
    return f"{answers_table(result)}\n{runs_table(result)}"


@command.main
def main(args: Namespace) -> None:
    """Measure the runs that are missing, nanoGPT's first."""
    text = text_of(args.data)
    runs = read_runs(args.out, text)
    measured = {(run["contender"], run["steps"]) for run in runs}
    wanted = dict.fromkeys(run for group in args.steps for run in group)
    # All of them before the first is trained, so that errors come at once.
    jobs = [
        make_job(name, steps, args.data, args.runs)
        for name, steps in wanted
        if (name, steps) not in measured
    ]
    needs_nanogpt = all(run["contender"] != NANOGPT for run in runs)

    def add(run: Row) -> None:
        check_devices([run], args.runs)
        runs.append(run)
        write_and_print(args.out, {"text": text, "runs": runs}, tables, draw)

    if needs_nanogpt:
        if args.nanogpt is None:
            raise ValueError(
                f"--out={args.out} has no run of nanoGPT, whose loss is the target. Pass --nanogpt "
                "FOLDER, a checkout of karpathy/nanoGPT"
            )
        nanogpt.check_nanogpt(args.nanogpt, args.data)
        add(nanogpt.measure(args.nanogpt, args.data, args.runs / "nanogpt"))
    for job in jobs:
        add(train(job))
    if not needs_nanogpt and not jobs:
        print(f"nothing to measure\n\n{tables({'runs': runs})}")
