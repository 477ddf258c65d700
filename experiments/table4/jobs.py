"""The runs behind our Table 4: their order, and the command line of each."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from data.text.shards import Manifest, SplitInfo
from evaluation.runs import check_same_settings, check_settings
from evaluation.sums import Scored, read_scored
from experiments.sweep import Run, refuse_overrides
from experiments.table4.models import MODELS, Budget, Model
from model.config import DEFAULT_ROPE_BASE
from model.flops import train_flops_per_token
from training.checkpoint.contents import Progress
from training.checkpoint.folders import latest_checkpoint
from training.checkpoint.reader import Checkpoint
from training.config import RUN_CONFIG
from training.language.config import TrainConfig, load_config
from training.metrics import read_evaluations, read_metrics

LOG_STEPS = 10  # between records of the training loss

SET_HERE = {
    "run.init_from": "--models",
    "data.path": "--data",
    "model.context_length": "--models",
}
"""Settings that make a run the one that its name says, and the options that decide them."""


@dataclass(frozen=True, kw_only=True)
class Job(Run[TrainConfig]):
    """One run: a model with a seed.

    Its arguments lack the number of steps where that follows from other runs.
    """

    schema: type[TrainConfig] = TrainConfig
    overrides: tuple[str, ...]
    """Arguments that come last."""

    @property
    def is_finished(self) -> bool:
        """Whether its last evaluation is there, and the checkpoint that is saved after it."""
        progress = self.progress
        return progress is not None and progress.step == last_step(self.folder)

    @property
    def progress(self) -> Progress | None:
        """What its newest checkpoint has seen, from which it would go on; None without one."""
        checkpoint = latest_checkpoint(self.folder)
        return None if checkpoint is None else Checkpoint.open(checkpoint).progress

    @property
    def may_differ(self) -> tuple[str, ...]:
        """Settings that a run of this job may have begun with otherwise: on other machines."""
        if MODELS[self.name].same_time_as is None:
            return "optim.micro_batch_size", "data.path"
        steps = ("optim.max_steps", "optim.warmup_steps", "run.eval_every")  # from its times
        return "optim.micro_batch_size", "data.path", *steps


def last_step(folder: Path) -> int | None:
    """Where the last evaluation of the run in `folder` was made; None if it was not yet."""
    begun = folder / RUN_CONFIG
    if not begun.exists():
        return None
    last = load_config([str(begun)]).optim.max_steps
    return last if last in {r["step"] for r in read_evaluations(folder)} else None


def training_cost(folder: Path, sums: Path) -> dict[str, Any] | None:
    """`step` and `gpu_hours` of a finished run, of its folder or its file in `sums`, or None."""
    if last_step(folder) is not None:
        return read_metrics(folder)[-1]
    kept = (read_scored(path)[0] for path in sorted(sums.glob(f"*/{folder.name}.npz")))
    return next((scored.about for scored in kept if is_whole(scored)), None)


def is_whole(scored: Scored) -> bool:
    """Whether a run was scored after its last evaluation."""
    last = scored.config.optim.max_steps
    steps = [record["step"] for record in scored.about["evaluations"]]
    return scored.about["step"] == last and last in steps


def check_texts(jobs: Sequence[Job], sums: Path, data: Path, *, folders: bool) -> None:
    """Refuse sums, FOLDER/CORPUS/RUN.npz, of other runs than these, or of runs on another text.

    If `folders`, also folders of runs that were begun on another text.

    Raises:
        ValueError: names the settings that differ, or how long the texts are.
    """
    here = Manifest.load(data).splits.get("train", SplitInfo()).tokens
    for job in jobs:
        texts: list[tuple[Path, int | None, str]] = []  # of how many tokens; early runs do not tell
        for path in sorted(sums.glob(f"*/{job.folder.name}.npz")):
            scored, _ = read_scored(path)
            check_settings(path, scored.config, job.config, may_differ=job.may_differ)
            texts.append((path, scored.about.get("text_tokens"), "--sums"))
        if folders and (checkpoint := latest_checkpoint(job.folder)) is not None:
            must_match = Checkpoint.open(checkpoint).must_match
            texts.append((job.folder, must_match.get("training tokens"), "--out"))
        for path, there, option in texts:
            if there not in (None, here):
                raise ValueError(
                    f"{path} is of a run that was trained on a text of {there:,} tokens, and "
                    f"--data has {here:,}: take the text that all were trained on, or another "
                    f"{option}"
                )


def make_jobs(
    names: Sequence[str],
    budget: Budget,
    out: Path,
    *,
    data: Path,
    vocab_size: int,
    seeds: int,
    gpus_per_run: int = 1,
    overrides: Sequence[str] = (),
) -> list[Job]:
    """The runs of some models: those of the first seed first, of a seed the longest chain first.

    Models that others start from or are measured by are added. Runs are trained in OUT/MODEL_seedN,
    with `overrides` (key=value) last.

    Raises:
        ValueError: a configuration is impossible, `overrides` sets what the sweep does, or a folder
            holds a run with other settings.
    """
    for name, value in (("seeds", seeds), ("gpus-per-run", gpus_per_run)):
        if value < 1:
            raise ValueError(f"--{name}={value} must be at least 1")
    refuse_overrides(overrides, SET_HERE)
    bound = [n for n in names if MODELS[n].same_time_as is not None or MODELS[n].share != 1]
    if bound and any(override.startswith("optim.max_steps=") for override in overrides):
        raise ValueError(
            f"--set optim.max_steps with {', '.join(bound)}, whose steps follow from those or the "
            "time of other models: leave one of them out"
        )
    for_all = [
        f"model.vocab_size={vocab_size}",
        f"data.path={data}",
        f"optim.batch_tokens={budget.batch_tokens}",
        f"run.log_every={LOG_STEPS}",
        "run.keep_last=1",
    ]
    most = budget.batch_tokens // gpus_per_run
    wanted = {other for name in names for other, _ in _needs(name, seed=1)}.union(names)
    jobs = [
        Job(
            name=name,
            seed=seed,
            folder=out / f"{name}_seed{seed}",
            arguments=(*_recipe(name, seed, budget, out, for_all, most), *overrides),
            overrides=tuple(overrides),
            needs=tuple(sorted(out / f"{other}_seed{n}" for other, n in _needs(name, seed))),
        )
        for name in MODELS
        if name in wanted
        for seed in range(1, seeds + 1)
    ]
    flops = {}
    for job in jobs:
        job.config.grad_accum_steps(gpus_per_run)
        check_same_settings(job.folder, job.config, may_differ=job.may_differ)
        a_token = train_flops_per_token(job.config.model, causal=True)
        flops[job.folder] = a_token * job.config.optim.max_steps

    @cache
    def chain(folder: Path) -> float:
        """FLOPs of a run and of the longest chain of runs that wait for it."""
        waiting = (chain(job.folder) for job in jobs if folder in job.needs)
        return flops[folder] + max(waiting, default=0.0)

    return sorted(jobs, key=lambda job: (job.seed, -chain(job.folder)))


def final_arguments(job: Job, sums: Path, here: Collection[Path] = ()) -> tuple[str, ...]:
    """The arguments of train.py, once all runs that the job needs are finished.

    A run that was begun keeps the number of steps that it began with, and other seeds take that of
    the first, wherever it was trained. Costs are read from `sums`, but for runs that are trained
    `here`: theirs are of another time.
    """
    model = MODELS[job.name]
    if model.same_time_as is None:
        return job.arguments
    first = job.folder.with_name(f"{job.name}_seed1")
    begun = [path for f in (job.folder, first) if (path := f / RUN_CONFIG).exists()]
    if begun:
        steps = load_config([str(begun[0])]).optim.max_steps
    elif first not in {job.folder, *here} and (cost := training_cost(first, sums)) is not None:
        steps = cost["step"]
    else:
        steps = _affordable_steps(job, model, sums)
    return *job.arguments, *_schedule(steps), *job.overrides


def _affordable_steps(job: Job, model: Model, sums: Path) -> int:
    """Steps that fit into the GPU-hours of `same_time_as`, at the speed of an equal model.

    Times are those of the first seed, so that all seeds have the same steps.

    Raises:
        ValueError: what it starts with took all of the time.
    """
    assert model.same_time_as is not None

    def first_seed(name: str) -> dict[str, Any]:
        cost = training_cost(job.folder.with_name(f"{name}_seed1"), sums)
        assert cost is not None, f"{name} is not finished"
        return cost

    def hours(name: str | None) -> float:
        """With those of the run whose weights it starts with."""
        if name is None:
            return 0.0
        return first_seed(name)["gpu_hours"] + hours(MODELS[name].starts_from)

    origin = model.starts_from
    whole, spent = hours(model.same_time_as), hours(origin)
    equal = first_seed(_equally_fast(job.name, model.same_time_as))
    hours_a_step = equal["gpu_hours"] / equal["step"]
    steps = round((whole - spent) / hours_a_step / LOG_STEPS) * LOG_STEPS
    if steps < LOG_STEPS:
        already = f", and {origin}, which it starts from, {spent:.4g} already" if origin else ""
        raise ValueError(
            f"{job.name} has no time left for {LOG_STEPS} steps: {model.same_time_as} took "
            f"{whole:.4g} GPU-hours{already}: leave {job.name} out of --models, or take a larger "
            "--budget"
        )
    return steps


def _equally_fast(name: str, same_time_as: str) -> str:
    """The model whose steps take as long as those of one that is trained for a time."""
    untimed = name.removesuffix("_same_time")
    return same_time_as if untimed == name else untimed


def _needs(name: str, seed: int) -> set[tuple[str, int]]:
    """Models and seeds of the runs that a run starts from or is measured by."""
    model = MODELS[name]
    needs = set() if model.starts_from is None else {(model.starts_from, seed)}
    if model.same_time_as is not None:  # times are those of the first seed
        needs |= {(other, 1) for other, _ in needs}
        needs |= {(model.same_time_as, 1), (_equally_fast(name, model.same_time_as), 1)}
    return needs


def _recipe(
    name: str, seed: int, budget: Budget, out: Path, for_all: Sequence[str], most: int
) -> tuple[str, ...]:
    """Arguments of a run: settings `for_all`, and at most so many tokens at once on a GPU."""
    model, base = MODELS[name], _base(name, budget)
    config = load_config(base)
    context_length = config.model.context_length
    at_once = min(config.optim.micro_batch_size * context_length, most)
    steps = round(budget.steps * model.share)
    recipe = [
        *(*base, *for_all, *_schedule(steps)),
        f"optim.micro_batch_size={max(1, at_once // context_length)}",
        # not the windows again that the first part began with
        f"run.seed={seed if model.starts_from is None else 1000 + seed}",
        f"run.out_dir={out / f'{name}_seed{seed}'}",
        f"run.save_every={_every(steps // 2, 2000)}",
    ]
    if model.starts_from is not None:
        origin = out / f"{model.starts_from}_seed{seed}"
        recipe += [f"run.init_from={origin}", f"optim.lr={config.optim.lr / 2}"]
        if config.model.positions == "rotary":
            before = load_config(_base(model.starts_from, budget)).model.context_length
            # as many turns of the slowest pair over the longer context as before over the old one,
            # b0 s^(D / (D - 2)): "NTK-aware" scaling in YaRN (arXiv 2309.00071, section 3.1)
            D = config.model.head_dim
            rope_base = DEFAULT_ROPE_BASE * (context_length / before) ** (D / (D - 2))
            recipe.append(f"model.rope_base={rope_base:.0f}")
    return tuple(recipe)


def _base(name: str, budget: Budget) -> list[str]:
    """A model's YAML file, and changes of the budget and the model."""
    model = MODELS[name]
    return [f"configs/{model.recipe}_{model.context}.yaml", *budget.overrides, *model.overrides]


def _schedule(steps: int) -> tuple[str, ...]:
    """Arguments for this many steps; warm-up is 1% as in the paper, but longer for short runs."""
    return (
        f"optim.max_steps={steps}",
        f"optim.warmup_steps={min(steps // 4, max(steps // 100, 200))}",
        f"run.eval_every={_every(steps // 6, 1000)}",
    )


def _every(steps: int, most: int) -> int:
    """So many steps or fewer, a multiple of LOG_STEPS."""
    return max(1, min(steps, most) // LOG_STEPS) * LOG_STEPS
