"""Train and score models of Table 4, and report on them."""

from argparse import Namespace
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path

from data.text.shards import Manifest
from evaluation.key_tokens import KeyTokens
from evaluation.plan import Plan
from evaluation.report import write_report
from evaluation.runs import note_sharing
from evaluation.score import validation_splits
from evaluation.sums import Scored, Text, describe_text
from evaluation.tables import compare, tabulate
from evaluation.windows import ScoringWindows
from experiments.gpu_pool import Task, python_command
from experiments.sweep import task_of, train_and_report
from experiments.table4.jobs import (
    Job,
    check_texts,
    final_arguments,
    make_jobs,
    training_cost,
)
from experiments.table4.key_tokens import keep_common, read_for_sweep
from experiments.table4.models import BUDGETS, MODELS
from experiments.table4.questions import PAIRS
from experiments.table4.report import write_table4
from experiments.table4.unfinished import (
    add_sums,
    print_skipped,
    read_sums,
    select_local_jobs,
    without_sums,
)


def make_plan(
    jobs: Sequence[Job], strides: Sequence[int] | None, histories: Sequence[int] | None
) -> Plan:
    """Plan the scorings of each run, independent of which runs are finished.

    Raises:
        ValueError: a history or a stride is longer than all contexts, or not positive.
    """
    contexts = sorted({job.config.model.context_length for job in jobs})
    plan = Plan(
        strides=tuple(strides) if strides else None,
        # always with the longest, which determines the scored tokens of all runs
        histories=tuple(sorted({*histories, contexts[-1]})) if histories else tuple(contexts),
        near=contexts[0],
        first=contexts[-1],
    )
    plan.check_lengths(contexts)
    return plan


def check_scorable(
    jobs: Sequence[Job], plan: Plan, data: Path, score_on: Sequence[Path]
) -> list[Text]:
    """Check before training that all runs can be scored.

    Returns:
        A description of each corpus, which that of its sums must equal.

    Raises:
        ValueError: a corpus is too short, or has another tokenizer than `data`; or the sliding
            windows share no token, or not the same tokens for all contexts.
    """
    texts, contexts = [], sorted({job.config.model.context_length for job in jobs})
    tokenizer = Manifest.load(data).tokenizer.sha256
    for stream in validation_splits(score_on):
        sha256 = stream.manifest.tokenizer.sha256
        if sha256 != tokenizer:
            raise ValueError(
                f"--score-on={stream.path} has a tokenizer with sha256={sha256}, which must be "
                f"{tokenizer}, that of --data={data}. Prepare one with the other's tokenizer.json"
            )
        for config in {job.name: job.config for job in jobs}.values():
            for scoring in plan.scorings_of(config, ()):
                ScoringWindows(stream, scoring, 1)
        text, _ = describe_text(stream, plan.compared(contexts))
        for context in contexts:  # each run is scored on its own, and must count the same tokens
            if describe_text(stream, plan.compared([context]))[0].counted != text.counted:
                raise ValueError(
                    f"--histories={' '.join(map(str, plan.histories))} must include every context. "
                    "Otherwise runs are scored on different tokens, as windows show 7/8 of the "
                    f"history. Try --histories {' '.join(map(str, contexts))}"
                )
        texts.append(text)
    return texts


def train_and_score(
    job: Job,
    plan: Plan,
    score_on: Sequence[Path],
    sums: Path,
    local: Collection[Path],
    key_tokens: Path | None,
    jobs_per_gpu: int,
) -> Task:
    """Task that trains a run and scores it on all corpora, and on `key_tokens` if given.

    `local` has the folders of all runs that are trained on this machine. The folder records how
    many jobs share the GPU of the run, or shared that of the run it starts from, whose time counts
    as its own.
    """

    options = [
        *("--sums", sums, "--data", *score_on),
        *(("--stride", *plan.strides) if plan.strides else ()),
        *("--histories", *plan.histories, "--near", plan.near, "--first", plan.first),
        *(("--key-tokens", key_tokens) if key_tokens else ()),
    ]

    def commands(n_gpu: int) -> list[list[str]]:
        train = python_command(n_gpu, "train.py", *final_arguments(job, sums, local))
        arguments = map(str, ("scripts.evaluate", job.folder, *options))
        scoring = python_command(n_gpu, "-m", *arguments)
        if job.is_finished:
            return [scoring]
        needed = [training_cost(folder, sums) or {} for folder in job.needs]
        most = max([jobs_per_gpu, *(cost.get("jobs_per_gpu") or 1 for cost in needed)])
        note_sharing(job.folder, most)
        return [train, scoring]

    return task_of(job.folder, commands, job.needs)


def report(
    jobs: Sequence[Job],
    plan: Plan,
    budget: str,
    texts: Sequence[Text],
    sums: Path,
    out: Path,
    key: KeyTokens | None,
    failed: Collection[str] = (),
) -> None:
    """Write the reports on all trained and scored runs: one evaluation per corpus, and the table.

    Reads only the files of `sums`. Runs that `failed` are skipped, because their files are
    outdated. LongPPL is on the key tokens `key`, or on those that all files share.

    Raises:
        ValueError: no run is trained and scored, or seeds of a model have different steps.
    """
    order = list(MODELS)
    ready: list[list[Scored]] = []
    steps: dict[str, int] = {}
    skipped: dict[str, list[str]] = {}
    for job in sorted(jobs, key=lambda job: (order.index(job.name), job.seed)):
        name = job.folder.name
        scored = "failed" if name in failed else read_sums(job, plan, texts, sums)
        if isinstance(scored, str):
            skipped.setdefault(scored, []).append(name)
            continue
        step = scored[0].about["step"]
        if steps.setdefault(job.name, step) != step:
            raise ValueError(
                f"{sums / texts[0].name / name}.npz has {step} steps, but another seed of "
                f"{job.name} has {steps[job.name]}. Train one of them again"
            )
        ready.append(scored)
    reasons = "; ".join(f"{why}: {', '.join(names)}" for why, names in skipped.items())
    if not ready:
        raise ValueError(f"{sums} has no run to report on ({reasons})")
    if skipped:
        print(f"not in the report: {reasons}")
    results, comparisons = {}, {}
    ready = keep_common(ready, texts, key)
    for text, runs in zip(texts, zip(*ready, strict=True), strict=True):
        results[text.name] = tabulate(runs, text)
        comparisons[text.name] = compare(runs, PAIRS)
        write_report(results[text.name], out / f"evaluation_{text.name}")
    write_table4(results, comparisons, budget, out)


def check_times(jobs: Sequence[Job], local: Collection[Job], jobs_per_gpu: int) -> None:
    """Check that runs whose times count do not share a GPU.

    Raises:
        ValueError: one of the `local` runs is trained for the time of others, or others of `jobs`
            are trained for its time.
    """
    timed = [job for job in jobs if MODELS[job.name].same_time_as is not None]
    folders = {need for job in timed for need in (job.folder, *job.needs)}
    sharing = [job.folder.name for job in local if job.folder in folders]
    if sharing and jobs_per_gpu > 1:
        raise ValueError(
            f"--jobs-per-gpu={jobs_per_gpu} must be 1 for {', '.join(sharing)}: their times "
            "determine steps of other runs, or are those of other runs. Train them with another "
            "command first, with --only"
        )


def sweep(args: Namespace, models: Sequence[str], budget_name: str, out: Path) -> None:
    """Run the sweep, and write OUT/table4.json.

    Args:
        args: options of `add_sweep_options`.
        models: keys of MODELS.
        budget_name: key of BUDGETS.
        out: folder.

    Raises:
        ValueError, FileNotFoundError: an option is invalid, or a file is missing or damaged.
        SystemExit: the sweep was stopped, or a run failed; the report is on all others.
    """
    budget = BUDGETS[budget_name]
    sums = args.sums or out / "sums"
    score_on = args.score_on or [args.data]
    add_sums(args.add, sums)
    jobs = make_jobs(
        models,
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
    key = args.key_tokens and read_for_sweep(args.key_tokens, jobs, texts, args.data)
    tasks = []
    if not args.report_only:
        reasons = without_sums(jobs, plan, texts, sums, key)
        local = select_local_jobs(jobs, args.only or ["*"], sums, reasons)
        check_times(jobs, local, args.jobs_per_gpu)
        print_skipped(jobs, local, reasons, sums)
        folders = {job.folder for job in local}
        options = plan, score_on, sums, folders, args.key_tokens, args.jobs_per_gpu
        tasks = [train_and_score(job, *options) for job in local]
    train_and_report(
        tasks,
        partial(report, jobs, plan, budget_name, texts, sums, out, key),
        gpus_per_run=args.gpus_per_run,
        runs_per_gpu=args.jobs_per_gpu,
    )
