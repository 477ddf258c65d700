"""What of Long Range Arena is trained and timed: its tasks, and the attentions that are compared.

Table 3 of the FlashAttention paper (arXiv 2205.14135): standard attention, FlashAttention and
block-sparse FlashAttention in the same small Transformer.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from configs.reader import read_config
from data.lra.store import MANIFEST
from experiments.classifier_runs import ClassifierRun
from training.classification.config import ClassifyConfig

CONFIGS = Path("configs/lra")


@dataclass(frozen=True, kw_only=True)
class LraTask:
    """A column of the table."""

    title: str
    config: str
    """Its YAML file is configs/lra/CONFIG.yaml, or configs/lra/CONFIG_rotary.yaml."""
    folder: str
    """Of the prepared data, as `scripts.prepare_lra` names it."""


TASKS = {
    "listops": LraTask(title="ListOps", config="listops", folder="listops"),
    "text": LraTask(title="Text", config="text", folder="text"),
    "retrieval": LraTask(title="Retrieval", config="retrieval", folder="retrieval"),
    "image": LraTask(title="Image", config="image", folder="image"),
    "pathfinder": LraTask(title="Pathfinder", config="pathfinder", folder="pathfinder32"),
    "pairs": LraTask(title="Pairs (in-house)", config="retrieval", folder="pairs"),
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

SHORT = 1024
"""Tokens up to which a butterfly has blocks of 64, as it would keep most of so few larger ones."""
SHORT_BLOCK, LONG_BLOCK = 64, 128
WINDOW_BLOCKS, GLOBAL_BLOCKS = 1, 1

RECIPES = ("paper", "rotary", "pretrained")
"""paper: learned positions, as those of the paper's table. rotary: rotary ones. pretrained: these,
after as many steps in which the model learns the hidden tokens of the same examples, as in "Never
Train From Scratch" (Amos, Berant and Gupta 2024, arXiv 2310.02980)."""

PRETRAINING = "masked"
"""The objective of the runs that those of the recipe pretrained start with, and in their names."""

PRETRAINING_LR = {"text": 5e-4}
"""Learning rates on hidden tokens, where they are not those on labels."""

SET_HERE = {
    "run.seed": "take --seeds",
    "run.out_dir": "take --out",
    "data.path": "take --data",
    "model.attention": "take --attentions",
    "model.mask.pattern": "take --attentions",
    "objective": "take --recipe",
    "run.init_from": "take --recipe",
}
"""Settings that make a run the one that its name says: what to take instead."""

_RUN_NAME = re.compile(
    rf"(?P<task>{'|'.join(TASKS)})(_(?P<recipe>{'|'.join(RECIPES[1:])}))?"
    rf"_(?P<attention>{'|'.join(ATTENTIONS)})_seed(?P<seed>\d+)"
)


@dataclass(frozen=True, kw_only=True)
class Job(ClassifierRun):
    """A task with an attention and a seed."""

    task: str
    attention: str
    seed: int
    needs: frozenset[str] = frozenset()
    """Names of runs that come before: the one whose best weights it starts with."""


def config_path(task: str, recipe: str) -> Path:
    """The YAML file of a task under a recipe, which need not exist."""
    name = TASKS[task].config
    return CONFIGS / (f"{name}.yaml" if recipe == "paper" else f"{name}_rotary.yaml")


def overrides_of(attention: str, context_length: int) -> tuple[str, ...]:
    """What makes a task's configuration one with this attention."""
    if attention == "standard":
        return ("model.attention=unfused",)
    if attention == "dense":
        return ("model.attention=auto", "model.mask.pattern=dense")
    return (
        "model.attention=auto",
        "model.mask.pattern=butterfly",
        f"model.mask.block_size={SHORT_BLOCK if context_length <= SHORT else LONG_BLOCK}",
        f"model.mask.window_blocks={WINDOW_BLOCKS}",
        f"model.mask.global_blocks={GLOBAL_BLOCKS}",
    )


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
    context_length = read_config(ClassifyConfig, [*given, *overrides]).model.context_length
    return *given, *overrides_of(attention, context_length), *overrides


def split_by_what_is_there(
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
    for override in overrides:
        key = override.partition("=")[0]
        if key in SET_HERE:
            raise ValueError(
                f"--set {override}: the sweep itself sets {key} for each run, {SET_HERE[key]}"
            )
    jobs: list[Job] = []
    for task in dict.fromkeys(tasks):
        for attention in dict.fromkeys(attentions):
            path, *shared = arguments_of(task, attention, data, recipe=recipe, overrides=overrides)
            for seed in dict.fromkeys(seeds):
                start: tuple[str, ...] = ()
                needs: frozenset[str] = frozenset()
                for suffix, changes in _stages(task, recipe).items():
                    folder = out / f"{task}{suffix}_{attention}_seed{seed}"
                    own = (*start, f"run.seed={seed}", f"run.out_dir={folder}")
                    jobs.append(
                        Job(
                            task=task,
                            attention=attention,
                            seed=seed,
                            folder=folder,
                            arguments=(path, *changes, *shared, *own),
                            needs=needs,
                        )
                    )
                    start, needs = (f"run.init_from={folder}",), frozenset({folder.name})
    for job in jobs:
        job.check_folder()
    order = list(dict.fromkeys(seeds))
    return sorted(jobs, key=lambda job: (order.index(job.seed), -cost(job.config)))


def _stages(task: str, recipe: str) -> dict[str, tuple[str, ...]]:
    """What the runs of a recipe, one after the other, have in their names and change."""
    if recipe != "pretrained":
        return {"" if recipe == "paper" else f"_{recipe}": ()}
    hidden = [f"objective={PRETRAINING}"]
    if task in PRETRAINING_LR:
        hidden.append(f"optim.lr={PRETRAINING_LR[task]}")
    return {f"_{PRETRAINING}": tuple(hidden), "_pretrained": ()}


def cost(config: ClassifyConfig) -> float:
    """About how long a run takes, in a unit of its own, to start the longest runs first.

    A token costs a share of its own and one for every key it sees, several times as much where the
    scores go through memory.
    """
    model, optim = config.model, config.optim
    T = model.context_length
    keys = model.mask.density(T, causal=False) * T * (8 if model.attention == "unfused" else 1)
    return optim.max_steps * optim.batch_size * model.documents * T * (1000 + keys)


@dataclass(frozen=True)
class RunName:
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
    recipe = found["recipe"] or "paper"
    return RunName(found["task"], found["attention"], recipe, int(found["seed"]))
