"""Which runs a call of experiments.table4 works on."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from evaluation.plan import Plan
from evaluation.sums import Scored, Text, read_scored
from experiments.table4.jobs import Job, is_whole, last_step, training_cost
from training.config import RUN_CONFIG
from training.metrics import read_evaluations


def read_sums(job: Job, plan: Plan, texts: Sequence[Text], sums: Path) -> list[Scored] | str:
    """What a report needs of a run, for each text; or why the run cannot be in the report."""
    paths = [sums / text.name / f"{job.folder.name}.npz" for text in texts]
    if not all(path.exists() for path in paths):
        return "not trained and scored"
    wanted, found = plan.scorings_of(job.config, ()), []
    for path, text in zip(paths, texts, strict=True):
        scored, there = read_scored(path)
        if there.sha256 != text.sha256:
            return f"scored on another text that is called {text.name}"
        if there.counted != text.counted or not scored.sums.keys() >= {*wanted}:
            return "not scored as these --models, --stride and --histories ask for"
        if not is_whole(scored):
            return "scored before it was finished"
        if scored.config.run.init_from is not None and scored.about["before"] is None:
            return "not known what the run took whose weights it starts with"
        if found and scored.about != found[0].about:
            return "scored on one text, trained anew, and scored on another"
        found.append(replace(scored, sums={scoring: scored.sums[scoring] for scoring in wanted}))
    return found


def without_sums(
    jobs: Sequence[Job], plan: Plan, texts: Sequence[Text], sums: Path
) -> dict[str, str]:
    """Names of runs whose sums are not there, or not of the run in their folder; and why."""
    reasons = {}
    for job in jobs:
        found = read_sums(job, plan, texts, sums)
        if isinstance(found, str):
            reasons[job.folder.name] = found
        elif (job.folder / RUN_CONFIG).exists() and (
            last_step(job.folder) != found[0].about["step"]
            or read_evaluations(job.folder)[-1]["gpu_hours"] != found[0].about["gpu_hours"]
        ):
            reasons[job.folder.name] = "trained anew, and not scored since"
    return reasons


def jobs_here(
    jobs: Sequence[Job], patterns: Sequence[str], sums: Path, without: Collection[str]
) -> list[Job]:
    """The unfinished runs whose names match a pattern, of earlier patterns first.

    Runs that match none are trained elsewhere. Of those that do, these are left: runs of which a
    report knows nothing yet, those `without` whole sums; runs that are named in full; and what
    these start from or are measured by.

    Raises:
        ValueError: a pattern matches no run, or a run elsewhere is needed and not there.
    """
    matched: dict[Path, Job] = {}
    for pattern in patterns:
        found = {job.folder: job for job in jobs if fnmatchcase(job.folder.name, pattern)}
        if not found:
            raise ValueError(
                f"--only={pattern} matches none of the runs of this sweep: "
                f"{', '.join(job.folder.name for job in jobs)}"
            )
        matched |= found
    folders = {folder for folder in matched if folder.name in {*patterns, *without}}
    while more := (
        set().union(*(_brings(j, folders) for j in jobs if j.folder in folders))
        & (matched.keys() - folders)
    ):
        folders |= more
    here = [job for job in matched.values() if job.folder in folders]

    new = [job for job in here if job.progress is None]
    elsewhere = {folder for job in new for folder in job.needs} - folders
    weights = set().union(*map(_weights, new)) - {job.folder for job in jobs if job.is_finished}
    missing = sorted(f.name for f in elsewhere if f in weights or training_cost(f, sums) is None)
    if missing:
        raise ValueError(
            f"--only leaves out {', '.join(missing)}, which others need: copy the folders of these "
            f"runs here (where only their time counts, their files in {sums} will do), or name "
            "them, too"
        )
    return here


def _weights(job: Job) -> set[Path]:
    """The folder of the run whose weights a run starts with, if there is one."""
    return {Path(job.config.run.init_from)} if job.config.run.init_from else set()


def _brings(job: Job, here: Collection[Path]) -> set[Path]:
    """Folders of the runs that must be trained for a run, among those `here`."""
    if job.progress is not None:
        return set()
    weights = _weights(job)
    # A time is never told by runs of two machines: one that is measured anew brings the others.
    times = set(job.needs) - (weights if job.seed > 1 else set())
    return weights | times if times & {*weights, *here} else weights


def print_skipped(
    jobs: Sequence[Job], here: Sequence[Job], reasons: Mapping[str, str], sums: Path
) -> None:
    """Print which of `jobs` their sums tell all of, and which of those `here` are trained anew.

    `reasons` are those of `without_sums`.
    """
    names = {job.folder.name for job in here}.union(reasons)
    kept = [name for job in jobs if (name := job.folder.name) not in names]
    if kept:
        print(
            f"nothing to do, as {sums} tells it all (or name them in full in --only): "
            f"{', '.join(kept)}"
        )
    for job in here:
        name = job.folder.name
        if job.progress is None and any(sums.glob(f"*/{name}.npz")):
            why = reasons.get(name, "its weights or times are needed, or it is named")
            print(f"trained once more: {name} ({why})")
