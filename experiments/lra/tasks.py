"""Tasks of Long Range Arena, and the attentions and recipes compared on them.

Table 3 of the FlashAttention paper (arXiv 2205.14135): standard attention, FlashAttention and
block-sparse FlashAttention in the same small Transformer.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from configs.reader import read_config
from data.lra.request import command_for
from data.lra.store import MANIFEST
from training.classification.config import ClassifyConfig


class LraTask(NamedTuple):
    """One task, a column of the table."""

    title: str
    config: str
    """Name of configs/lra/CONFIG.yaml and configs/lra/CONFIG_rotary.yaml."""
    folder: str
    """Folder of the prepared data, as `scripts.prepare_lra` names it."""


TASKS = {
    "listops": LraTask("ListOps", "listops", "listops"),
    "text": LraTask("Text", "text", "text"),
    "retrieval": LraTask("Retrieval", "retrieval", "retrieval"),
    "image": LraTask("Image", "image", "image"),
    "pathfinder": LraTask("Pathfinder", "pathfinder", "pathfinder32"),
    "pairs": LraTask("Pairs (in-house)", "retrieval", "pairs"),
    "aclsum": LraTask("Shared citations (aclsum, not AAN)", "aclsum", "aclsum"),
}

IN_HOUSE = ("pairs", "aclsum")
"""Tasks like Retrieval that are not part of the benchmark, nor of its average."""

BENCHMARK = tuple(name for name in TASKS if name not in IN_HOUSE)
"""The tasks of the paper's table, in its order."""

ATTENTIONS = {
    "standard": "standard attention",
    "dense": "Papilio, dense",
    "butterfly": "Papilio, butterfly",
}
"""Titles of the attentions. standard: eager PyTorch with all scores in memory. dense: Papilio's
exact attention. butterfly: its block-sparse attention, the fixed pattern of the paper's downstream
tasks."""

RECIPES = ("paper", "rotary", "pretrained")
"""paper: learned positions, as in the paper's table. rotary: rotary positions. pretrained: rotary,
after the same number of steps on hidden tokens of the same examples, as in "Never Train From
Scratch" (Amos, Berant and Gupta 2024, arXiv 2310.02980)."""

CONFIGS = Path("configs/lra")
OVERRIDES = {
    "standard": ("model.attention=eager",),
    "dense": ("model.attention=auto", "model.mask.pattern=dense"),
    "butterfly": (
        *("model.attention=auto", "model.mask.pattern=butterfly"),
        *("model.mask.window_blocks=1", "model.mask.global_blocks=1"),
    ),
}
"""Settings of each attention."""


def suffix_of(recipe: str) -> str:
    """Suffix of the task in the names of a recipe's runs and report."""
    return "" if recipe == "paper" else f"_{recipe}"


def config_path(task: str, recipe: str) -> Path:
    """Path of the YAML file of a task under a recipe; the file may not exist."""
    return CONFIGS / f"{TASKS[task].config}{'' if recipe == 'paper' else '_rotary'}.yaml"


def arguments_of(
    task: str, attention: str, data: Path, *, recipe: str = "paper", overrides: Sequence[str] = ()
) -> tuple[str, ...]:
    """Build the arguments of train.py for a task with an attention.

    `data` is the folder of the prepared tasks. `overrides`, key=value, come last and can also set
    the block size of a butterfly. Its default depends on the context length.
    """
    given = (str(config_path(task, recipe)), f"data.path={data / TASKS[task].folder}")
    ours = OVERRIDES[attention]
    if attention == "butterfly":
        length = read_config(ClassifyConfig, [*given, *overrides]).model.context_length
        # with so few blocks of 128, the butterfly would keep most of them
        ours = (*ours, f"model.mask.block_size={64 if length <= 1024 else 128}")
    return *given, *ours, *overrides


def trainable_tasks(tasks: Sequence[str], data: Path, recipe: str = "paper") -> list[str]:
    """Select the tasks that can be trained, and print why others are skipped.

    Skipped are tasks without a configuration of the recipe, and Retrieval if it is not prepared:
    its texts must be requested from their authors.

    Raises:
        FileNotFoundError: another task is not prepared.
    """
    trainable = []
    for task in tasks:
        folder = data / TASKS[task].folder
        if not config_path(task, recipe).exists():
            print(f"skipping {task}: {config_path(task, recipe)} does not exist")
        elif (folder / MANIFEST).exists():
            trainable.append(task)
        elif task == "retrieval":
            print(
                f"skipping {task}: {folder} is not prepared (python -m scripts.prepare_lra "
                "retrieval --source FOLDER, with the published lra_release)"
            )
        else:
            raise FileNotFoundError(
                f"{folder} is not prepared. Run {command_for(folder)}, or leave {task} out of "
                "--tasks"
            )
    return trainable
