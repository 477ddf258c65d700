"""Is longer context better? The paper's Table 4, with equal tokens, seeds and intervals.

    python -m experiments.table4 --data out/data/books --budget minutes
    python -m experiments.table4 --data out/data/openwebtext --budget paper --gpus-per-run 8

Trains each model of --models with each seed, on all GPUs of this machine, one run a GPU (or a group
of --gpus-per-run), all with the same tokens a step, the same tokens in all, the same schedule and
the same text; scores them on the same validation tokens (scripts.evaluate), and writes a report.
Stopped, the same command goes on. A model that is measured by another one's time, or starts from
its weights, brings that one along. Several machines can share the work, each with its --only: put
the files of all --sums into one folder, and call the command with --report-only. No more is needed
of the runs, and none is trained again for want of its folder alone, unless --only names it in full.
"""

from argparse import Namespace
from pathlib import Path

from experiments.harness import Command
from experiments.table4.models import BUDGETS, MODELS


def check(args: Namespace) -> None:
    """Refuse a choice of runs to train where none is trained."""
    if args.only and args.report_only:
        raise ValueError("argument --report-only: not allowed with argument --only")


command = Command(__name__)
add = command.add
add("--data", type=Path, required=True, help="token shards to train on")
add("--budget", choices=BUDGETS, default="minutes")
add("--models", nargs="+", choices=MODELS, metavar="MODEL", help=f"of {', '.join(MODELS)}")
add("--seeds", type=int, help="runs of each model (default: the budget's)")
add(
    "--only", nargs="+", metavar="RUN",
    help="train and score no others here, as '*_seed2'; earlier ones are started first",
)  # fmt: skip
add("--gpus-per-run", type=int, default=1)
add("--out", type=Path, help="folder (default: out/table4_BUDGET)")
add("--score-on", type=Path, nargs="+", help="corpora to score on (default: --data)")
add("--sums", type=Path, help="what a report needs of each run (default: OUT/sums)")
add("--stride", type=int, nargs="+", help="as for scripts.evaluate")
add("--histories", type=int, nargs="+", help="for cross (default: contexts of all models)")
add("--report-only", action="store_true", help="report on what is finished and scored")
add("--set", nargs="+", default=[], metavar="key=value", help="for all runs, as for train.py")
command.read(check=check)

from collections.abc import Collection, Sequence
from functools import partial

from data.text.shards import Manifest
from evaluation.plan import Plan
from evaluation.report import write_report
from evaluation.score import validation_splits
from evaluation.sums import Scored, Text, describe_text
from evaluation.tables import compare, tabulate
from evaluation.windows import ScoringWindows
from experiments.gpu_pool import Task, python_command
from experiments.sweep import task_of, train_and_report
from experiments.table4.jobs import Job, check_texts, final_arguments, make_jobs
from experiments.table4.questions import PAIRS
from experiments.table4.report import write_table4
from experiments.table4.unfinished import jobs_here, print_skipped, read_sums, without_sums


def make_plan(
    jobs: Sequence[Job], strides: Sequence[int] | None, histories: Sequence[int] | None
) -> Plan:
    """The scorings of each run, whichever runs are finished.

    Raises:
        ValueError: a history or a stride is longer than all contexts, or none.
    """
    contexts = sorted({job.config.model.context_length for job in jobs})
    plan = Plan(
        strides=tuple(strides) if strides else None,
        # with the longest, by which all runs know which tokens count
        histories=tuple(sorted({*histories, contexts[-1]})) if histories else tuple(contexts),
        near=contexts[0],
        first=contexts[-1],
    )
    plan.check_lengths(contexts)
    return plan


def check_scorable(
    jobs: Sequence[Job], plan: Plan, data: Path, score_on: Sequence[Path]
) -> list[Text]:
    """Refuse before anything is trained what could not be scored in the end.

    Returns:
        The facts of each corpus, which those of sums must equal.

    Raises:
        ValueError: a corpus is too short, or was made with another tokenizer than `data`; or
            windows that slide share no token, or not the same ones for all contexts.
    """
    texts, contexts = [], sorted({job.config.model.context_length for job in jobs})
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
        text, _ = describe_text(stream, plan.compared(contexts))
        for context in contexts:  # a run is scored alone, and must count the same tokens
            if describe_text(stream, plan.compared([context]))[0].counted != text.counted:
                raise ValueError(
                    f"--histories={' '.join(map(str, plan.histories))} leaves out a context whose "
                    "windows show 7/8 of the history to other tokens, so that not all runs would "
                    f"be scored on the same: name all of {', '.join(map(str, contexts))}"
                )
        texts.append(text)
    return texts


def train_and_score(
    job: Job, plan: Plan, score_on: Sequence[Path], sums: Path, here: Collection[Path]
) -> Task:
    """Train a run, one of those `here`, and score it on all corpora."""

    options = [
        *("--sums", sums, "--data", *score_on),
        *(("--stride", *plan.strides) if plan.strides else ()),
        *("--histories", *plan.histories, "--near", plan.near, "--first", plan.first),
    ]

    def commands(n_gpu: int) -> list[list[str]]:
        train = python_command(n_gpu, "train.py", *final_arguments(job, sums, here))
        words = map(str, ("scripts.evaluate", job.folder, *options))
        scoring = python_command(n_gpu, "-m", *words)
        return [scoring] if job.is_finished else [train, scoring]

    return task_of(job.folder, commands, job.needs)


def report(
    jobs: Sequence[Job],
    plan: Plan,
    budget: str,
    texts: Sequence[Text],
    sums: Path,
    out: Path,
    failed: Collection[str] = (),
) -> None:
    """Write the reports of what is trained and scored: one evaluation a corpus, and the table.

    All is read from the files of `sums`; of runs that `failed`, these are of earlier ones.

    Raises:
        ValueError: nothing is trained and scored, or seeds were trained for other steps.
    """
    order = list(MODELS)
    ready: list[list[Scored]] = []
    steps: dict[str, int] = {}
    left_out: dict[str, list[str]] = {}
    for job in sorted(jobs, key=lambda job: (order.index(job.name), job.seed)):
        name = job.folder.name
        found = "failed" if name in failed else read_sums(job, plan, texts, sums)
        if isinstance(found, str):
            left_out.setdefault(found, []).append(name)
            continue
        step = found[0].about["step"]
        if steps.setdefault(job.name, step) != step:
            raise ValueError(
                f"{sums / texts[0].name / name}.npz was trained for {step} steps, and another seed "
                f"of {job.name} for {steps[job.name]}: train one of them anew"
            )
        ready.append(found)
    why = "; ".join(f"{why}: {', '.join(names)}" for why, names in left_out.items())
    if not ready:
        raise ValueError(f"{sums} holds no run to report on ({why})")
    if left_out:
        print(f"not in the report: {why}")
    results, comparisons = {}, {}
    for text, scored in zip(texts, zip(*ready, strict=True), strict=True):
        results[text.name] = tabulate(scored, text)
        comparisons[text.name] = compare(scored, PAIRS)
        write_report(results[text.name], out / f"evaluation_{text.name}")
    write_table4(results, comparisons, budget, out)


@command.main
def main(args: Namespace) -> None:
    """Run the command."""
    budget = BUDGETS[args.budget]
    out = args.out or Path(f"out/table4_{args.budget}")
    sums = args.sums or out / "sums"
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
    plan = make_plan(jobs, args.stride, args.histories)
    texts = check_scorable(jobs, plan, args.data, score_on)
    check_texts(jobs, sums, args.data, folders=not args.report_only)
    tasks = []
    if not args.report_only:
        reasons = without_sums(jobs, plan, texts, sums)
        here = jobs_here(jobs, args.only or ["*"], sums, reasons)
        print_skipped(jobs, here, reasons, sums)
        folders = {job.folder for job in here}
        tasks = [train_and_score(job, plan, score_on, sums, folders) for job in here]
    train_and_report(
        tasks,
        partial(report, jobs, plan, args.budget, texts, sums, out),
        gpus_per_run=args.gpus_per_run,
    )
