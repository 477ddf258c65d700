"""What of Long Range Arena is trained and timed: its tasks, and the attentions compared on them.

Table 3 of the FlashAttention paper (arXiv 2205.14135): standard attention, FlashAttention and
block-sparse FlashAttention in one small Transformer.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from configs.reader import read_config
from data.lra.store import MANIFEST
from experiments.classifier_runs import ClassifierRun, refuse_overrides
from training.classification.config import ClassifyConfig

CONFIGS = Path("configs/lra")


class LraTask(NamedTuple):
    """A column of the table."""

    title: str
    config: str
    """Name of configs/lra/CONFIG.yaml and configs/lra/CONFIG_rotary.yaml."""
    folder: str
    """Of the prepared data, as `scripts.prepare_lra` names it."""


TASKS = {
    "listops": LraTask("ListOps", "listops", "listops"),
    "text": LraTask("Text", "text", "text"),
    "retrieval": LraTask("Retrieval", "retrieval", "retrieval"),
    "image": LraTask("Image", "image", "image"),
    "pathfinder": LraTask("Pathfinder", "pathfinder", "pathfinder32"),
    "pairs": LraTask("Pairs (in-house)", "retrieval", "pairs"),
}

BENCHMARK = tuple(name for name in TASKS if name != "pairs")
"""The tasks of the paper's table, in its order."""

ATTENTIONS = {
    "standard": "standard attention",
    "dense": "ours, dense",
    "butterfly": "ours, butterfly",
}
"""standard: PyTorch's operations one after the other, all scores in memory. dense: ours, exact.
butterfly: ours, block-sparse, the fixed pattern of the paper's downstream tasks."""

OVERRIDES = {
    "standard": ("model.attention=unfused",),
    "dense": ("model.attention=auto", "model.mask.pattern=dense"),
    "butterfly": (
        *("model.attention=auto", "model.mask.pattern=butterfly"),
        *("model.mask.window_blocks=1", "model.mask.global_blocks=1"),
    ),
}
"""Settings of each attention."""

SHORT = 1024
"""Tokens up to which a butterfly has blocks of 64, as it would keep most of so few larger ones."""
SHORT_BLOCK, LONG_BLOCK = 64, 128

RECIPES = ("paper", "rotary", "pretrained")
"""paper: learned positions, as those of the paper's table. rotary: rotary ones. pretrained: these,
after as many steps in which the model learns the hidden tokens of these examples, as in "Never
Train From Scratch" (Amos, Berant and Gupta 2024, arXiv 2310.02980)."""

PRETRAINING = "masked"
"""The objective of the runs that those of the recipe pretrained start with, and in their names."""

PRETRAINING_LR = {"text": 5e-4}
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

_RUN_NAME = re.compile(
    rf"({'|'.join(TASKS)})(?:_({'|'.join(RECIPES[1:])}))?_({'|'.join(ATTENTIONS)})_seed(\d+)"
)


@dataclass(frozen=True, kw_only=True)
class Job(ClassifierRun):
    """A task with an attention and a seed."""

    task: str
    attention: str


class RunName(NamedTuple):
    """What the name of a run's folder says."""

    task: str
    attention: str
    recipe: str
    seed: int


def parse_name(name: str) -> RunName | None:
    """Read the name of a folder that `make_jobs` gave; None if it is none."""
    found = _RUN_NAME.fullmatch(name)
    if found is None:
        return None
    task, recipe, attention, seed = found.groups()
    return RunName(task, attention, recipe or "paper", int(seed))


def config_path(task: str, recipe: str) -> Path:
    """The YAML file of a task under a recipe, which need not exist."""
    return CONFIGS / f"{TASKS[task].config}{'' if recipe == 'paper' else '_rotary'}.yaml"


def arguments_of(
    task: str, attention: str, data: Path, *, recipe: str = "paper", overrides: Sequence[str] = ()
) -> tuple[str, ...]:
    """The arguments of train.py for a task with an attention.

    Args:
        task: of TASKS.
        attention: of ATTENTIONS.
        data: folder of the prepared tasks.
        recipe: of RECIPES.
        overrides: key=value; the block size of a butterfly follows from the context length here,
            and may be set, too.
    """
    given = (str(config_path(task, recipe)), f"data.path={data / TASKS[task].folder}")
    ours = OVERRIDES[attention]
    if attention == "butterfly":
        length = read_config(ClassifyConfig, [*given, *overrides]).model.context_length
        ours = (*ours, f"model.mask.block_size={SHORT_BLOCK if length <= SHORT else LONG_BLOCK}")
    return *given, *ours, *overrides


def trainable_tasks(
    tasks: Sequence[str], data: Path, recipe: str = "paper"
) -> tuple[list[str], list[str]]:
    """The tasks that can be trained, and a sentence for each that is left out.

    Only Retrieval, whose texts cannot be downloaded without asking for them, and tasks without a
    configuration of the recipe may be missing.

    Raises:
        FileNotFoundError: another task is not prepared.
    """
    there, left_out = [], []
    for task in tasks:
        folder = data / TASKS[task].folder
        if not config_path(task, recipe).exists():
            left_out.append(f"{task} is left out: there is no {config_path(task, recipe)}")
        elif (folder / MANIFEST).exists():
            there.append(task)
        elif task == "retrieval":
            left_out.append(
                f"{task} is left out: {folder} is not prepared (python -m scripts.prepare_lra "
                "retrieval --source FOLDER, with the published lra_release)"
            )
        else:
            raise FileNotFoundError(
                f"{folder} is not prepared: python -m scripts.prepare_lra {TASKS[task].folder} "
                f"--out {data}, or leave {task} out of --tasks"
            )
    return there, left_out


def make_jobs(
    tasks: Sequence[str],
    attentions: Sequence[str],
    seeds: Sequence[int],
    *,
    data: Path,
    out: Path,
    recipe: str = "paper",
    overrides: Sequence[str] = (),
) -> list[Job]:
    """All runs: those of the first seed first, of a seed the most expensive first.

    Args:
        tasks, attentions, seeds: every combination is a run.
        data: folder of the prepared tasks.
        out: folder of all runs: TASK_ATTENTION_seedN, or TASK_RECIPE_ATTENTION_seedN.
        recipe: of RECIPES; with pretrained, TASK_masked_ATTENTION_seedN comes before each.
        overrides: key=value for all runs, last.

    Raises:
        ValueError: a configuration is impossible, `overrides` sets what the sweep does, or a folder
            holds a run with other settings.
    """
    refuse_overrides(overrides, SET_HERE)
    jobs: list[Job] = []
    for task in dict.fromkeys(tasks):
        for attention in dict.fromkeys(attentions):
            path, *shared = arguments_of(task, attention, data, recipe=recipe, overrides=overrides)
            for seed in dict.fromkeys(seeds):
                before: Path | None = None
                for suffix, changes in _stages(task, recipe).items():
                    folder = out / f"{task}{suffix}_{attention}_seed{seed}"
                    start = () if before is None else (f"run.init_from={before}",)
                    own = (*start, f"run.seed={seed}", f"run.out_dir={folder}")
                    jobs.append(
                        Job(
                            task=task,
                            attention=attention,
                            seed=seed,
                            folder=folder,
                            arguments=(path, *changes, *shared, *own),
                            needs=frozenset() if before is None else frozenset({before.name}),
                        )
                    )
                    before = folder
    for job in jobs:
        job.check_folder()
    return sorted(jobs, key=lambda job: (seeds.index(job.seed), -cost(job.config)))


def _stages(task: str, recipe: str) -> dict[str, tuple[str, ...]]:
    """The runs of a recipe, one after the other: what their names have in them, and settings."""
    if recipe != "pretrained":
        return {"" if recipe == "paper" else f"_{recipe}": ()}
    hidden = [f"objective={PRETRAINING}"]
    if task in PRETRAINING_LR:
        hidden.append(f"optim.lr={PRETRAINING_LR[task]}")
    return {f"_{PRETRAINING}": tuple(hidden), "_pretrained": ()}


def cost(config: ClassifyConfig) -> float:
    """About how long a run takes, in an arbitrary unit, to start the longest runs first.

    A token costs a fixed share and one for every key it sees, several times as much where the
    scores go through memory.
    """
    model, optim = config.model, config.optim
    T = model.context_length
    keys = model.mask.density(T, causal=False) * T * (8 if model.attention == "unfused" else 1)
    return optim.max_steps * optim.batch_size * model.documents * T * (1000 + keys)
