"""Which runs a call of experiments.table4 works on."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from evaluation.plan import Plan
from evaluation.sums import Scored, Text, read_scored
from experiments.table4.jobs import Job, is_whole, last_step, what_it_took
from training.config import RUN_CONFIG
from training.metrics import read_evaluations


def found_sums(job: Job, texts: Sequence[Text], sums: Path) -> list[tuple[Scored, Text]]:
    """What is there of a run, in the order of `texts`."""
    paths = [sums / text.name / f"{job.folder.name}.npz" for text in texts]
    return [read_scored(path) for path in paths if path.exists()]


def why_not(
    job: Job, plan: Plan, found: Sequence[tuple[Scored, Text]], texts: Sequence[Text]
) -> str | None:
    """Why a run cannot be in the report, if so."""
    if len(found) < len(texts):
        return "not trained and scored"
    for (scored, there), text in zip(found, texts, strict=True):
        if there.sha256 != text.sha256:
            return f"scored on another text that is called {text.name}"
        if there.counted != text.counted or not scored.sums.keys() >= set(
            plan.scorings_of(job.config, ())
        ):
            return "not scored as these --models, --stride and --histories ask for"
        if not is_whole(scored):
            return "scored before it was finished"
        if scored.config.run.init_from is not None and scored.about["before"] is None:
            return "not known what the run took whose weights it starts with"
        if scored.about != found[0][0].about:
            return "scored on one text, trained anew, and scored on another"
    return None


def without_sums(
    jobs: Sequence[Job], plan: Plan, texts: Sequence[Text], sums: Path
) -> dict[str, str]:
    """Names of runs whose sums are not there, or not of the run in their folder; and why.

    Arguments as for `report`.
    """
    reasons = {}
    for job in jobs:
        found = found_sums(job, texts, sums)
        why = why_not(job, plan, found, texts)
        if why is None and (job.folder / RUN_CONFIG).exists():
            about, evaluations = found[0][0].about, read_evaluations(job.folder)
            if last_step(job.folder) != about["step"] or (
                evaluations[-1]["gpu_hours"] != about["gpu_hours"]
            ):
                why = "trained anew, and not scored since"
        if why is not None:
            reasons[job.folder.name] = why
    return reasons


def jobs_here(
    jobs: Sequence[Job], patterns: Sequence[str], sums: Path, without: Collection[str]
) -> list[Job]:
    """What is left to do of the runs that match a pattern, of earlier patterns first.

    Runs that match none are trained elsewhere. Of those that do, these are left: runs of which a
    report knows nothing yet, runs that are named in full, and what these start from or are
    measured by.

    Args:
        jobs: all of the sweep.
        patterns: of names of runs.
        sums: of runs that were trained elsewhere, among others.
        without: names of runs whose sums do not tell it all.

    Raises:
        ValueError: a pattern matches no run, or a run elsewhere is needed and not there.
    """
    for pattern in patterns:
        if not any(fnmatchcase(job.folder.name, pattern) for job in jobs):
            raise ValueError(
                f"--only={pattern} matches none of the runs of this sweep: "
                f"{', '.join(job.folder.name for job in jobs)}"
            )
    matched = list(
        dict.fromkeys(job for p in patterns for job in jobs if fnmatchcase(job.folder.name, p))
    )
    folders = {job.folder for job in matched if job.folder.name in {*patterns, *without}}
    ours = {job.folder for job in matched}
    while more := set().union(*(_brings(j, folders) for j in jobs if j.folder in folders)) & (
        ours - folders
    ):
        folders |= more
    here = [job for job in matched if job.folder in folders]

    new = [job for job in here if job.progress is None]
    elsewhere = {folder for job in new for folder in job.needs} - folders
    weights = {Path(job.config.run.init_from) for job in new if job.config.run.init_from}
    finished = {job.folder for job in jobs if job.is_finished}
    missing = sorted(
        folder.name
        for folder in elsewhere
        if what_it_took(folder, sums) is None or folder in weights - finished
    )
    if missing:
        raise ValueError(
            f"--only leaves out {', '.join(missing)}, which others need: copy the folders of these "
            f"runs here (where only their time counts, their files in {sums} will do), or name "
            "them, too"
        )
    return [replace(job, needs=tuple(f for f in job.needs if f in folders)) for job in here]


def _brings(job: Job, here: Collection[Path]) -> set[Path]:
    """Folders of the runs that must be trained for a run, among those `here`."""
    if job.progress is not None:
        return set()
    weights = {Path(job.config.run.init_from)} if job.config.run.init_from else set()
    # A time is never told by runs of two machines: one that is measured anew brings the others.
    times = set(job.needs) - (weights if job.seed > 1 else set())
    return weights | times if times & {*weights, *here} else weights


def say_what_is_done(
    jobs: Sequence[Job], here: Sequence[Job], reasons: Mapping[str, str], sums: Path
) -> None:
    """Print which runs are not trained, as their sums tell it all, and which are once more.

    Args:
        jobs: all of the sweep.
        here: those that something is done with.
        reasons: as `without_sums` gave them.
        sums: as for `report`.
    """
    names = [job.folder.name for job in here]
    kept = [name for job in jobs if (name := job.folder.name) not in {*names, *reasons}]
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
