"""What of Long Range Arena is trained and timed: its tasks, and the attentions compared on them.

Table 3 of the FlashAttention paper (arXiv 2205.14135): standard attention, FlashAttention and
block-sparse FlashAttention in one small Transformer.
"""

from collections.abc import Sequence
from itertools import product
from pathlib import Path

from configs.reader import read_config
from data.lra.store import MANIFEST
from evaluation.runs import HOW, check_same_settings
from experiments.lra.tasks import TASKS
from experiments.sweep import Run, refuse_overrides, run_in
from training.classification.config import ClassifyConfig

CONFIGS = Path("configs/lra")
OVERRIDES = {
    "standard": ("model.attention=unfused",),
    "dense": ("model.attention=auto", "model.mask.pattern=dense"),
    "butterfly": (
        *("model.attention=auto", "model.mask.pattern=butterfly"),
        *("model.mask.window_blocks=1", "model.mask.global_blocks=1"),
    ),
}
"""Settings of each attention."""

PRETRAINING_LR = {"text": ("optim.lr=0.0005",)}
"""Learning rates on hidden tokens, where they are not those on labels."""

SET_HERE = {
    "run.seed": "--seeds",
    "run.out_dir": "--out",
    "data.path": "--data",
    "model.attention": "--attentions",
    "model.mask.pattern": "--attentions",
    "objective": "--recipe",
    "run.init_from": "--recipe",
}
"""Settings that a run's name tells, and the options that decide them."""


def suffix_of(recipe: str) -> str:
    """What stands after the task in the names of a recipe's runs and report."""
    return "" if recipe == "paper" else f"_{recipe}"


def config_path(task: str, recipe: str) -> Path:
    """The YAML file of a task under a recipe, which need not exist."""
    return CONFIGS / f"{TASKS[task].config}{'' if recipe == 'paper' else '_rotary'}.yaml"


def arguments_of(
    task: str, attention: str, data: Path, *, recipe: str = "paper", overrides: Sequence[str] = ()
) -> tuple[str, ...]:
    """The arguments of train.py for a task with an attention.

    `data` is the folder of the prepared tasks. `overrides`, key=value, may set the block size of a
    butterfly, too, which otherwise follows from the context length.
    """
    given = (str(config_path(task, recipe)), f"data.path={data / TASKS[task].folder}")
    ours = OVERRIDES[attention]
    if attention == "butterfly":
        length = read_config(ClassifyConfig, [*given, *overrides]).model.context_length
        # of blocks of 128, it would keep most of so few
        ours = (*ours, f"model.mask.block_size={64 if length <= 1024 else 128}")
    return *given, *ours, *overrides


def trainable_tasks(tasks: Sequence[str], data: Path, recipe: str = "paper") -> list[str]:
    """The tasks that can be trained; prints why others are left out.

    Only Retrieval, whose texts cannot be downloaded without asking for them, and tasks without a
    configuration of the recipe may be missing.

    Raises:
        FileNotFoundError: another task is not prepared.
    """
    there = []
    for task in tasks:
        folder = data / TASKS[task].folder
        if not config_path(task, recipe).exists():
            print(f"{task} is left out: there is no {config_path(task, recipe)}")
        elif (folder / MANIFEST).exists():
            there.append(task)
        elif task == "retrieval":
            print(
                f"{task} is left out: {folder} is not prepared (python -m scripts.prepare_lra "
                "retrieval --source FOLDER, with the published lra_release)"
            )
        else:
            raise FileNotFoundError(
                f"{folder} is not prepared: python -m scripts.prepare_lra {TASKS[task].folder} "
                f"--out {data}, or leave {task} out of --tasks"
            )
    return there


def make_jobs(
    tasks: Sequence[str],
    attentions: Sequence[str],
    seeds: Sequence[int],
    *,
    data: Path,
    out: Path,
    recipe: str = "paper",
    overrides: Sequence[str] = (),
) -> list[Run[ClassifyConfig]]:
    """All runs: those of the first seed first, of a seed the most expensive first.

    Every task with every attention and seed is a run in `out`, TASK_ATTENTION_seedN or
    TASK_RECIPE_ATTENTION_seedN; with the recipe pretrained, TASK_masked_ATTENTION_seedN comes
    before each. `overrides`, key=value, come last in all of them.

    Raises:
        ValueError: a configuration is impossible, `overrides` sets what the sweep does, or a folder
            holds a run with other settings.
    """
    refuse_overrides(overrides, SET_HERE)
    jobs = []
    cases = product(dict.fromkeys(tasks), dict.fromkeys(attentions), dict.fromkeys(seeds))
    for task, attention, seed in cases:
        path, *shared = arguments_of(task, attention, data, recipe=recipe, overrides=overrides)
        stages = {suffix_of(recipe): ()}
        if recipe == "pretrained":
            stages = {"_masked": ("objective=masked", *PRETRAINING_LR.get(task, ()))} | stages
        before = None
        for suffix, changes in stages.items():
            name, settings = f"{task}{suffix}_{attention}", (path, *changes, *shared)
            job = run_in(out, name, seed, ClassifyConfig, settings, before=before)
            check_same_settings(job.folder, job.config, may_differ=HOW)
            jobs.append(job)
            before = name
    return sorted(jobs, key=lambda job: (seeds.index(job.seed), -cost(job.config)))


def cost(config: ClassifyConfig) -> float:
    """About how long a run takes, in an arbitrary unit, to start the longest runs first.

    A token costs a fixed share and one for every key it sees, several times as much where the
    scores go through memory.
    """
    model, optim = config.model, config.optim
    T = model.context_length
    keys = model.mask.density(T, causal=False) * T * (8 if model.attention == "unfused" else 1)
    return optim.max_steps * optim.batch_size * model.documents * T * (1000 + keys)
