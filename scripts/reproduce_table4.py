"""Is longer context better? The paper's Table 4, with equal tokens, seeds and intervals.

    python -m scripts.reproduce_table4 --data out/data/books --budget minutes
    python -m scripts.reproduce_table4 --data out/data/openwebtext --budget paper --gpus-per-run 8

Trains each model of --models with each seed, on all GPUs of this machine, one run a GPU (or a group
of --gpus-per-run), all with the same tokens a step, the same tokens in all, the same schedule and
the same text; scores them on the same validation tokens (scripts.evaluate), and writes a report.
Stopped, the same command goes on. A model that is measured by another one's time, or starts from
its weights, brings that one along. Several machines can share the work, each with its --only: put
the folders of all runs into one, and call the command with --report-only; weights may be left out
there.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

from configs import RUN_CONFIG
from configs.command_line import errors_as_sentences
from data.shards import Manifest
from data.windows import ScoringWindows
from scripts.evaluate import evaluate_runs, is_scored, validation_splits
from scripts.evaluation_plan import STRIDE, Plan
from scripts.evaluation_report import write_report
from scripts.evaluation_tables import compare, tabulate
from scripts.gpu_pool import Task, groups_of_gpus, python_command, run_tasks
from scripts.table4_comparisons import PAIRS
from scripts.table4_models import BUDGETS, MODELS
from scripts.table4_plan import Job, final_arguments, last_step, make_jobs
from scripts.table4_report import write_table4
from training.distributed import start_processes
from training.metrics import METRICS


def make_plan(jobs: Sequence[Job], strides: Sequence[int]) -> Plan:
    """The same scorings for each run, whichever runs are finished."""
    configs = [job.config for job in jobs]
    contexts = sorted({config.model.context_length for config in configs})
    return Plan(
        strides=tuple(strides),
        histories=tuple(contexts),
        near=contexts[0],
        first=contexts[-1],
    )


def check_scorable(jobs: Sequence[Job], plan: Plan, data: Path, score_on: Sequence[Path]) -> None:
    """Refuse before anything is trained what could not be scored in the end.

    Raises:
        ValueError: a corpus is too short, or was made with another tokenizer than `data`.
    """
    tokenizer = Manifest.load(data).tokenizer.sha256
    for stream in validation_splits(score_on):
        there = stream.manifest.tokenizer.sha256
        if there != tokenizer:
            raise ValueError(
                f"--score-on {stream.path} was made with a tokenizer of sha256={there}, and "
                f"--data {data} with {tokenizer}: prepare one with the tokenizer.json of the other"
            )
        for config in {job.name: job.config for job in jobs}.values():
            for scoring in plan.scorings_of(config, ()):
                ScoringWindows(stream, scoring, 1)


def jobs_here(jobs: Sequence[Job], patterns: Sequence[str]) -> list[Job]:
    """Those whose runs match a pattern, of earlier patterns first; others are trained elsewhere.

    Raises:
        ValueError: a pattern matches no run, or a run elsewhere is needed and not there.
    """
    for pattern in patterns:
        if not any(fnmatchcase(job.folder.name, pattern) for job in jobs):
            raise ValueError(
                f"--only={pattern} matches none of the runs of this sweep: "
                f"{', '.join(job.folder.name for job in jobs)}"
            )
    here = list(
        dict.fromkeys(job for p in patterns for job in jobs if fnmatchcase(job.folder.name, p))
    )
    folders = {job.folder for job in here}
    elsewhere = {folder for job in here for folder in job.needs} - folders
    missing = sorted(folder.name for folder in elsewhere if last_step(folder) is None)
    if missing:
        raise ValueError(
            f"--only leaves out {', '.join(missing)}, which others need: copy the folders of these "
            f"runs here ({RUN_CONFIG} and {METRICS} will do where only their time counts)"
        )
    return [replace(job, needs=tuple(f for f in job.needs if f in folders)) for job in here]


def task_of(job: Job, plan: Plan, score_on: Sequence[Path]) -> Task:
    """Train a run and score it on all corpora."""

    def commands(n_gpu: int) -> list[list[str]]:
        train = python_command(n_gpu, "train.py", *final_arguments(job))
        numbers = {
            "--stride": plan.strides,
            "--histories": plan.histories,
            "--near": (plan.near,),
            "--first": (plan.first,),
        }
        options = [word for name, values in numbers.items() for word in (name, *map(str, values))]
        scoring = python_command(
            n_gpu, "-m", "scripts.evaluate", str(job.folder), "--score-only",
            "--data", *map(str, score_on), *options,
        )  # fmt: skip
        return [scoring] if job.is_finished else [train, scoring]

    return Task(
        name=job.folder.name,
        needs=frozenset(folder.name for folder in job.needs),
        commands=commands,
        log=job.folder.with_suffix(".log"),
    )


def report(
    jobs: Sequence[Job], plan: Plan, budget: str, score_on: Sequence[Path], out: Path
) -> None:
    """Write the reports of what is trained and scored: one evaluation a corpus, and the table.

    Nothing is scored here. A run is left out as well if it starts with the weights of one that
    does not tell what it took.

    Raises:
        ValueError: nothing is trained and scored.
    """
    order = {name: number for number, name in enumerate(MODELS)}
    trained = [job for job in jobs if job.is_finished and job.cost_is_known]
    ready = sorted(
        (job for job in trained if is_scored(job.folder, plan, score_on)),
        key=lambda job: (order[job.name], job.seed),
    )
    if not ready and not trained:
        raise ValueError(f"no run in {out} is finished: there is nothing to report yet")
    if not ready:
        raise ValueError(
            f"{', '.join(job.folder.name for job in trained)} are trained, but not scored from "
            f"position {plan.first} on with histories {plan.histories} and strides {plan.strides}: "
            "take the --models, --stride and --score-on that they were scored with, or score them "
            "anew without --report-only"
        )
    for what, left_out in (
        ("not finished", [job for job in jobs if job not in trained]),
        ("not scored with these --models", [job for job in trained if job not in ready]),
    ):
        if left_out:
            names = ", ".join(job.folder.name for job in left_out)
            print(f"{what}, so not in the report: {names}")
    results, comparisons = {}, {}
    with start_processes("auto") as processes:
        folders = [job.folder for job in ready]
        for scored, stream in evaluate_runs(folders, plan, processes, corpora=score_on):
            name = stream.path.resolve().name
            results[name] = tabulate(scored, stream)
            comparisons[name] = compare(scored, stream, PAIRS)
            write_report(results[name], out / f"evaluation_{name}")
    write_table4(results, comparisons, {job.folder: job.name for job in ready}, budget, out)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.reproduce_table4",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", type=Path, required=True, help="token shards to train on")
    parser.add_argument("--budget", choices=BUDGETS, default="minutes")
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, metavar="MODEL", help=f"of {', '.join(MODELS)}"
    )
    parser.add_argument("--seeds", type=int, help="runs of each model (default: the budget's)")
    part = parser.add_mutually_exclusive_group()
    part.add_argument(
        "--only",
        nargs="+",
        metavar="RUN",
        help="train and score no others here, as '*_seed2'; earlier ones are started first",
    )
    parser.add_argument("--gpus-per-run", type=int, default=1)
    parser.add_argument("--out", type=Path, help="folder (default: out/table4_BUDGET)")
    parser.add_argument(
        "--score-on", type=Path, nargs="+", help="corpora to score on (default: --data)"
    )
    parser.add_argument("--stride", type=int, nargs="+", default=[STRIDE])
    part.add_argument(
        "--report-only", action="store_true", help="report on what is finished and scored"
    )
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="key=value", help="for all runs, as for train.py"
    )
    args = parser.parse_args(argv)
    budget = BUDGETS[args.budget]
    out = args.out or Path(f"out/table4_{args.budget}")
    score_on = args.score_on or [args.data]
    jobs = make_jobs(
        args.models or budget.models,
        budget,
        out,
        data=args.data,
        vocab_size=Manifest.load(args.data).tokenizer.vocab_size,
        seeds=budget.seeds if args.seeds is None else args.seeds,
        gpus_per_run=args.gpus_per_run,
        overrides=args.set,
    )
    plan = make_plan(jobs, args.stride)
    check_scorable(jobs, plan, args.data, score_on)
    failed = []
    if not args.report_only:
        here = jobs if args.only is None else jobs_here(jobs, args.only)
        tasks = [task_of(job, plan, score_on) for job in here]
        try:
            failed = run_tasks(tasks, groups_of_gpus(args.gpus_per_run), partial(print, flush=True))
        except SystemExit:
            print("stopped: the same command goes on from here", file=sys.stderr)
            raise
    if failed:
        print(f"these runs failed, and are not in the report: {', '.join(failed)}")
    report(jobs, plan, args.budget, score_on, out)
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    with errors_as_sentences():
        main()
