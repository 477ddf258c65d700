"""Select the runs that a call of experiments.table4 trains and scores."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from data.files import write_atomically
from evaluation.key_tokens import KeyTokens
from evaluation.plan import Plan
from evaluation.sums import Scored, Sums, Text, read_scored
from evaluation.windows import Scoring
from experiments.table4.jobs import Job, is_finished, last_step, training_cost
from experiments.table4.key_tokens import is_scored_on
from training.config import RUN_CONFIG
from training.metrics import read_evaluations


def add_sums(folders: Sequence[Path], sums: Path) -> None:
    """Copy the scores FOLDER/CORPUS/RUN.npz that `sums` lacks from other folders.

    Raises:
        FileNotFoundError: a folder has no scores.
    """
    for folder in folders:
        paths = sorted(folder.glob("*/*.npz"))
        if not paths:
            raise FileNotFoundError(
                f"--add={folder} has no scores CORPUS/RUN.npz. Give a folder that "
                "experiments.table4 filled, by default OUT/sums"
            )
        for path in paths:
            target = sums / path.parent.name / path.name
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(target, path.read_bytes())


def read_sums(job: Job, plan: Plan, texts: Sequence[Text], sums: Path) -> list[Scored] | str:
    """Read the scores of a run on each text, or return why it cannot be in the report."""
    paths = [sums / text.name / f"{job.folder.name}.npz" for text in texts]
    if not all(path.exists() for path in paths):
        return "not trained and scored"
    wanted, result = plan.scorings_of(job.config, ()), []
    for path, text in zip(paths, texts, strict=True):
        scored, scored_text = read_scored(path)
        if scored_text.sha256 != text.sha256:
            return f"scored on another text with the name {text.name}"
        if scored_text.counted != text.counted or not scored.sums.keys() >= {*wanted}:
            return "scored with other --models, --stride or --histories"
        if not is_finished(scored):
            return "scored before it was finished"
        if scored.config.run.init_from is not None and scored.about["before"] is None:
            return "the cost of the run that it starts from is unknown"
        if result and scored.about != result[0].about:
            return "trained again between the scorings of two texts"
        key = scored.key and replace(scored.key, sums=_only(scored.key.sums, wanted))
        result.append(replace(scored, sums=_only(scored.sums, wanted), key=key))
    return result


def _only(sums: Mapping[Scoring, Sums], wanted: Sequence[Scoring]) -> dict[Scoring, Sums]:
    return {scoring: sums[scoring] for scoring in wanted if scoring in sums}


def without_sums(
    jobs: Sequence[Job],
    plan: Plan,
    texts: Sequence[Text],
    sums: Path,
    key: KeyTokens | None = None,
) -> dict[str, str]:
    """Map runs without valid sums to the reason: missing, or older than the run in its folder.

    Also those without losses on the key tokens `key`, but only if they need not be trained again.
    """
    reasons = {}
    for job in jobs:
        scored = read_sums(job, plan, texts, sums)
        if isinstance(scored, str):
            reasons[job.folder.name] = scored
        elif (job.folder / RUN_CONFIG).exists() and (
            last_step(job.folder) != scored[0].about["step"]
            or read_evaluations(job.folder)[-1]["gpu_hours"] != scored[0].about["gpu_hours"]
        ):
            reasons[job.folder.name] = "trained again, and not scored since"
        elif key is not None and not is_scored_on(key, scored, texts) and job.is_finished:
            reasons[job.folder.name] = "not scored on these key tokens"
    return reasons


def select_local_jobs(
    jobs: Sequence[Job], patterns: Sequence[str], sums: Path, without: Collection[str]
) -> list[Job]:
    """Select the unfinished runs that match a pattern, in the order of the patterns.

    Runs that match no pattern are trained elsewhere. Of the others, this selects runs `without`
    complete sums, runs that a pattern names in full, and the runs that these depend on.

    Raises:
        ValueError: a pattern matches no run, or a run that is needed from elsewhere is missing.
    """
    matched: dict[Path, Job] = {}
    for pattern in patterns:
        matches = {job.folder: job for job in jobs if fnmatchcase(job.folder.name, pattern)}
        if not matches:
            raise ValueError(
                f"--only={pattern} must match a run of this sweep: "
                f"{', '.join(job.folder.name for job in jobs)}"
            )
        matched |= matches
    folders = {folder for folder in matched if folder.name in {*patterns, *without}}
    while more := (
        set().union(*(_dependencies(j, folders) for j in jobs if j.folder in folders))
        & (matched.keys() - folders)
    ):
        folders |= more
    local = [job for job in matched.values() if job.folder in folders]

    new = [job for job in local if job.progress is None]
    elsewhere = {folder for job in new for folder in job.needs} - folders
    weights = set().union(*map(_weights, new)) - {job.folder for job in jobs if job.is_finished}
    missing = sorted(f.name for f in elsewhere if f in weights or training_cost(f, sums) is None)
    if missing:
        raise ValueError(
            f"--only leaves out {', '.join(missing)}, which other runs need. Add them to --only, "
            f"or copy their folders here (if only their time is needed, their files in {sums})"
        )
    return local


def _weights(job: Job) -> set[Path]:
    """Folder of the run that a run starts from, if any."""
    return {Path(job.config.run.init_from)} if job.config.run.init_from else set()


def _dependencies(job: Job, local: Collection[Path]) -> set[Path]:
    """Folders of the runs in `local` that must be trained for a run."""
    if job.progress is not None:
        return set()
    weights = _weights(job)
    # Times must come from one machine: if one of these runs is timed again, all are.
    times = set(job.needs) - (weights if job.seed > 1 else set())
    return weights | times if times & {*weights, *local} else weights


def print_skipped(
    jobs: Sequence[Job], local: Sequence[Job], reasons: Mapping[str, str], sums: Path
) -> None:
    """Print which of `jobs` need no work, and which of those in `local` are trained again.

    `reasons` is the result of `without_sums`.
    """
    names = {job.folder.name for job in local}.union(reasons)
    kept = [name for job in jobs if (name := job.folder.name) not in names]
    if kept:
        print(
            f"skipped, because {sums} has their scores (to train them again, give their full names "
            f"in --only): {', '.join(kept)}"
        )
    for job in local:
        name = job.folder.name
        if job.progress is None and any(sums.glob(f"*/{name}.npz")):
            why = reasons.get(name, "its weights or time are needed, or --only has its name")
            print(f"training again: {name} ({why})")
