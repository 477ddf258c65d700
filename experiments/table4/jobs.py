"""Runs of our Table 4: their order, and the command line of each."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from data.text.shards import Manifest, SplitInfo
from evaluation.runs import check_same_settings, check_settings, jobs_per_gpu
from evaluation.sums import Scored, read_scored
from experiments.sweep import Run, refuse_overrides
from experiments.table4.models import MODELS, Budget, Model
from model.config import DEFAULT_ROPE_BASE
from training.checkpoint.contents import Progress
from training.checkpoint.folders import latest_checkpoint
from training.checkpoint.reader import Checkpoint
from training.config import RUN_CONFIG
from training.language.config import TrainConfig, load_config
from training.language.stages import flops_per_token
from training.metrics import read_evaluations, read_metrics

LOG_STEPS = 10  # steps between records of the training loss

SET_HERE = {
    "run.init_from": "--models",
    "data.path": "--data",
    "model.context_length": "--models",
}
"""Settings that the name of a run determines, and the options that control them."""


@dataclass(frozen=True, kw_only=True)
class Job(Run[TrainConfig]):
    """One run: a model with a seed.

    Its arguments lack the number of steps if that depends on the time of other runs.
    """

    schema: type[TrainConfig] = TrainConfig
    overrides: tuple[str, ...]
    """Arguments that come last."""

    @property
    def is_finished(self) -> bool:
        """Whether the run has its last evaluation, and the checkpoint after it."""
        progress = self.progress
        return progress is not None and progress.step == last_step(self.folder)

    @property
    def progress(self) -> Progress | None:
        """Progress of the newest checkpoint, from which it would resume; None without one."""
        checkpoint = latest_checkpoint(self.folder)
        return None if checkpoint is None else Checkpoint.open(checkpoint).progress

    @property
    def may_differ(self) -> tuple[str, ...]:
        """Settings in which an existing run of this job may differ, such as on other machines."""
        if MODELS[self.name].same_time_as is None:
            return "optim.micro_batch_size", "data.path"
        # depend on the time of other runs
        steps = ("optim.max_steps", "optim.warmup_steps", "run.eval_every")
        return "optim.micro_batch_size", "data.path", *steps


def last_step(folder: Path) -> int | None:
    """Step of the last evaluation of a finished run in `folder`; None if unfinished."""
    config = folder / RUN_CONFIG
    if not config.exists():
        return None
    last = load_config([str(config)]).optim.max_steps
    return last if last in {r["step"] for r in read_evaluations(folder)} else None


def training_cost(folder: Path, sums: Path) -> dict[str, Any] | None:
    """`step`, `gpu_hours` and `jobs_per_gpu` (unknown in old runs) of a finished run, or None.

    From its folder, or from its file in `sums`.
    """
    if last_step(folder) is not None:
        return read_metrics(folder)[-1] | {"jobs_per_gpu": jobs_per_gpu(folder)}
    saved = (read_scored(path)[0] for path in sorted(sums.glob(f"*/{folder.name}.npz")))
    return next((scored.about for scored in saved if is_finished(scored)), None)


def is_finished(scored: Scored) -> bool:
    """Whether a run was scored after its last evaluation."""
    last = scored.config.optim.max_steps
    steps = [record["step"] for record in scored.about["evaluations"]]
    return scored.about["step"] == last and last in steps


def check_texts(jobs: Sequence[Job], sums: Path, data: Path, *, folders: bool) -> None:
    """Check that sums, FOLDER/CORPUS/RUN.npz, belong to these runs and to the same training text.

    If `folders`, also check that the runs in existing folders have the same training text.

    Raises:
        ValueError: settings or text lengths differ; the message has them.
    """
    expected = training_tokens(data)
    for job in jobs:
        texts: list[tuple[Path, int | None, str]] = []  # tokens; early runs did not record them
        for path in sorted(sums.glob(f"*/{job.folder.name}.npz")):
            scored, _ = read_scored(path)
            check_settings(path, scored.config, job.config, may_differ=job.may_differ)
            texts.append((path, scored.about.get("text_tokens"), "--sums"))
        if folders and (checkpoint := latest_checkpoint(job.folder)) is not None:
            must_match = Checkpoint.open(checkpoint).must_match
            texts.append((job.folder, must_match.get("training tokens"), "--out"))
        for path, n_tokens, option in texts:
            if n_tokens not in (None, expected):
                raise ValueError(
                    f"{path} belongs to a run on a text of {n_tokens:,} tokens, which must be "
                    f"{expected:,} as in --data. Use the text that all runs were trained on, or "
                    f"another {option}"
                )


def training_tokens(data: Path) -> int:
    """Length of the training text of token shards."""
    return Manifest.load(data).splits.get("train", SplitInfo()).tokens


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
    """Build the runs of some models, by seed, and then with the longest chain of runs first.

    Models whose weights or time others need are added. Runs are trained in OUT/MODEL_seedN, with
    `overrides` (key=value) last.

    Raises:
        ValueError: a configuration is invalid, `overrides` has a setting that the sweep controls,
            or a folder has a run with other settings.
    """
    for name, value in (("seeds", seeds), ("gpus-per-run", gpus_per_run)):
        if value < 1:
            raise ValueError(f"--{name}={value} must be at least 1")
    refuse_overrides(overrides, SET_HERE)
    bound = [n for n in names if MODELS[n].same_time_as is not None or MODELS[n].share != 1]
    if bound and any(override.startswith("optim.max_steps=") for override in overrides):
        raise ValueError(
            f"--set optim.max_steps cannot be combined with {', '.join(bound)}, whose steps depend "
            "on the steps or time of other models. Leave one of them out"
        )
    for_all = [
        f"model.vocab_size={vocab_size}",
        f"data.path={data}",
        f"optim.batch_tokens={budget.batch_tokens}",
        f"run.log_every={LOG_STEPS}",
        "run.keep_last=1",
    ]
    max_tokens = budget.batch_tokens // gpus_per_run
    wanted = {other for name in names for other, _ in _needs(name, seed=1)}.union(names)
    jobs = [
        Job(
            name=name,
            seed=seed,
            folder=out / f"{name}_seed{seed}",
            arguments=(*_recipe(name, seed, budget, out, for_all, max_tokens), *overrides),
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
        per_token = flops_per_token(job.config.model, job.config.stages, causal=True)
        flops[job.folder] = per_token * job.config.tokens

    @cache
    def chain(folder: Path) -> float:
        """FLOPs of a run and of the longest chain of runs that depend on it."""
        waiting = (chain(job.folder) for job in jobs if folder in job.needs)
        return flops[folder] + max(waiting, default=0.0)

    return sorted(jobs, key=lambda job: (job.seed, -chain(job.folder)))


def final_arguments(job: Job, sums: Path, local: Collection[Path] = ()) -> tuple[str, ...]:
    """Final arguments of train.py, once all runs that the job depends on are finished.

    A started run keeps its number of steps, and other seeds use that of the first seed, wherever it
    was trained. Costs are read from `sums`, except for `local` runs, which are trained on this
    machine: their `sums` are outdated.
    """
    model = MODELS[job.name]
    if model.same_time_as is None:
        return job.arguments
    first = job.folder.with_name(f"{job.name}_seed1")
    started = [path for f in (job.folder, first) if (path := f / RUN_CONFIG).exists()]
    if started:
        steps = load_config([str(started[0])]).optim.max_steps
    elif first not in {job.folder, *local} and (cost := training_cost(first, sums)) is not None:
        steps = cost["step"]
    else:
        steps = _affordable_steps(job, model, sums)
    return *job.arguments, *_schedule(steps), *job.overrides


def _affordable_steps(job: Job, model: Model, sums: Path) -> int:
    """Number of steps that fit into the GPU-hours of `same_time_as`.

    The speed is that of a model whose steps take as long.

    Times are those of the first seed, so that all seeds have the same steps.

    Raises:
        ValueError: the run that it starts from took all of the time, or one of these runs shared
            its GPU with others.
    """
    assert model.same_time_as is not None

    def first_seed(name: str) -> dict[str, Any]:
        cost = training_cost(job.folder.with_name(f"{name}_seed1"), sums)
        assert cost is not None, f"{name} is not finished"
        if (cost.get("jobs_per_gpu") or 1) > 1:
            raise ValueError(
                f"{job.name} needs the time of {name}_seed1, which shared its GPU with other runs. "
                f"Remove that run and its scores, and train it with --jobs-per-gpu=1, or leave "
                f"{job.name} out of --models"
            )
        return cost

    def hours(name: str | None) -> float:
        """GPU-hours of a model, including the run that it starts from."""
        if name is None:
            return 0.0
        return first_seed(name)["gpu_hours"] + hours(MODELS[name].starts_from)

    origin = model.starts_from
    total, spent = hours(model.same_time_as), hours(origin)
    equal = first_seed(_equally_fast(job.name, model.same_time_as))
    hours_per_step = equal["gpu_hours"] / equal["step"]
    steps = round((total - spent) / hours_per_step / LOG_STEPS) * LOG_STEPS
    if steps < LOG_STEPS:
        used = f", and {origin}, which it starts from, used {spent:.4g}" if origin else ""
        raise ValueError(
            f"{job.name} has no time left for {LOG_STEPS} steps: {model.same_time_as} took "
            f"{total:.4g} GPU-hours{used}. Leave {job.name} out of --models, or try a larger "
            "--budget"
        )
    return steps


def _equally_fast(name: str, same_time_as: str) -> str:
    """Name of the model whose steps take as long as those of `name`."""
    untimed = name.removesuffix("_same_time")
    return same_time_as if untimed == name else untimed


def _needs(name: str, seed: int) -> set[tuple[str, int]]:
    """Models and seeds of the runs whose weights or time a run needs."""
    model = MODELS[name]
    needs = set() if model.starts_from is None else {(model.starts_from, seed)}
    if model.same_time_as is not None:  # times are those of the first seed
        needs |= {(other, 1) for other, _ in needs}
        needs |= {(model.same_time_as, 1), (_equally_fast(name, model.same_time_as), 1)}
    return needs


def _recipe(
    name: str, seed: int, budget: Budget, out: Path, for_all: Sequence[str], max_tokens: int
) -> tuple[str, ...]:
    """Arguments of a run, with the settings `for_all` and at most `max_tokens` per micro-batch."""
    model, base = MODELS[name], _base(name, budget)
    config = load_config(base)
    context_length = config.model.context_length
    micro_batch_tokens = min(config.optim.micro_batch_size * context_length, max_tokens)
    steps = round(budget.steps * model.share)
    recipe = [
        *(*base, *for_all, *_schedule(steps)),
        f"optim.micro_batch_size={max(1, micro_batch_tokens // context_length)}",
        # a new seed, so that it does not repeat the windows of the first part
        f"run.seed={seed if model.starts_from is None else 1000 + seed}",
        f"run.out_dir={out / f'{name}_seed{seed}'}",
        f"run.save_every={_every(steps // 2, 2000)}",
    ]
    if model.starts_from is not None:
        origin = out / f"{model.starts_from}_seed{seed}"
        recipe += [f"run.init_from={origin}", f"optim.lr={config.optim.lr / 2}"]
        if config.model.positions == "rotary":
            before = load_config(_base(model.starts_from, budget)).model.context_length
            # "NTK-aware" scaling, b0 s^(D / (D - 2)), in YaRN (arXiv 2309.00071, section 3.1): the
            # slowest pair rotates as far over the longer context as before over the shorter one
            D = config.model.head_dim
            rope_base = DEFAULT_ROPE_BASE * (context_length / before) ** (D / (D - 2))
            recipe.append(f"model.rope_base={rope_base:.0f}")
    return tuple(recipe)


def _base(name: str, budget: Budget) -> list[str]:
    """YAML file of a model, and the overrides of budget and model."""
    model = MODELS[name]
    return [f"configs/{model.recipe}_{model.context}.yaml", *budget.overrides, *model.overrides]


def _schedule(steps: int) -> tuple[str, ...]:
    """Arguments for `steps` steps; warmup is 1% as in the paper, but longer for short runs."""
    return (
        f"optim.max_steps={steps}",
        f"optim.warmup_steps={min(steps // 4, max(steps // 100, 200))}",
        f"run.eval_every={_every(steps // 6, 1000)}",
    )


def _every(steps: int, limit: int) -> int:
    """Round `steps`, at most `limit`, down to a multiple of LOG_STEPS."""
    return max(1, min(steps, limit) // LOG_STEPS) * LOG_STEPS
