"""Finished runs on Long Range Arena: what was trained, what it took and what came of it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data.files import write_atomically
from evaluation.results import add_runs, read_result
from evaluation.runs import HOW, check_settings
from experiments.classifier_runs import is_finished, read_run_config
from experiments.lra.jobs import ATTENTIONS, TASKS, RunName, config_path, parse_name
from model.classifier import Classifier
from training.classification.config import ClassifyConfig
from training.config import RUN_CONFIG
from training.environment import read_starts
from training.metrics import read_metrics

JOBS_PER_GPU = "jobs_per_gpu.json"
"""File in the folder of a run: how many runs shared its GPU, at most."""

SETTINGS = (
    *("steps", "examples", "examples_in_all", "test_examples", "config"),
    *("context_length", "documents", "parameters", "positions", "padding", "changes"),
    *("block_size", "density", "batch_size", "lr"),
)
"""What the seeds of a task with an attention have in common, of what is told of a run."""


def note_sharing(folder: Path, jobs_per_gpu: int) -> None:
    """Note in the folder of a run that so many runs share its GPU; the most is kept."""
    folder.mkdir(parents=True, exist_ok=True)
    most = max(jobs_per_gpu, _sharing(folder) or 1)
    write_atomically(folder / JOBS_PER_GPU, f"{most}\n".encode())


def finished_runs(out: Path, recipe: str) -> list[dict[str, Any]]:
    """All finished runs of a recipe in a folder, in the order of tasks, attentions and seeds.

    Raises:
        ValueError: two runs that differ in their seed by name differ in more.
    """
    found: list[tuple[RunName, Path]] = [
        (name, folder)
        for folder in out.glob("*_seed*")
        if (name := parse_name(folder.name)) is not None
        and name.recipe == recipe
        and (folder / RUN_CONFIG).exists()
        and is_finished(folder)
    ]
    found.sort(key=lambda x: (*_row(x[0].task, x[0].attention), x[0].seed))
    first: dict[tuple[str, str], ClassifyConfig] = {}
    runs = []
    for name, folder in found:
        config = read_run_config(folder)
        of_first = first.setdefault((name.task, name.attention), config)
        check_settings(folder, config, of_first, may_differ=(*HOW, "run.seed"))
        runs.append(describe(name, folder, config))
    return runs


def with_others(
    runs: Sequence[dict[str, Any]], reports: Sequence[Path], recipe: str
) -> list[dict[str, Any]]:
    """Runs and those of other reports that are not among them, in the order of `finished_runs`.

    Raises:
        ValueError: a report is of another recipe, or seeds differ in SETTINGS.
    """
    if not reports:
        return list(runs)
    for path in reports:
        found = read_result(path, "recipe")["recipe"]
        if found != recipe:
            raise ValueError(f"--add {path}: it is of the recipe {found}, and this one of {recipe}")
    every = add_runs(runs, reports, _order)
    first: dict[tuple[str, str], dict[str, Any]] = {}
    for run in every:
        of_first = first.setdefault((run["task"], run["attention"]), run)
        for name in SETTINGS:
            if run[name] != of_first[name]:
                raise ValueError(
                    f"--add: of {run['task']} with {run['attention']} attention, seed "
                    f"{run['seed']} has {name}={run[name]}, and seed {of_first['seed']} "
                    f"{of_first[name]}: train both alike, or leave the report with one of them out"
                )
    return every


def _order(run: dict[str, Any]) -> tuple[int, int, int]:
    return (*_row(run["task"], run["attention"]), run["seed"])


def _row(task: str, attention: str) -> tuple[int, int]:
    return list(TASKS).index(task), list(ATTENTIONS).index(attention)


def describe(name: RunName, folder: Path, config: ClassifyConfig) -> dict[str, Any]:
    """What was trained, what it took and what came of it, as JSON can hold it."""
    records = read_metrics(folder)
    last, model, optim = records[-1], config.model, config.optim
    evaluations = [r for r in records if "val_accuracy" in r]
    before = _pretraining(folder, config)
    took = [last] if before is None else [last, read_metrics(before)[-1]]
    return {
        "task": name.task,
        "attention": name.attention,
        "seed": config.run.seed,
        "test_accuracy": 100 * last["test_accuracy"],
        "test_loss": last["test_loss"],
        "test_examples": last["test_examples"],
        "best_step": last["best_step"],
        "best_val_accuracy": 100 * last["best_val_accuracy"],
        "steps": last["step"],
        "examples": last["examples"],
        "examples_in_all": sum(end["examples"] for end in took),
        "minutes": 60 * sum(end["gpu_hours"] for end in took),
        "jobs_per_gpu": _sharing(folder),
        "config": str(config_path(name.task, name.recipe)),
        "context_length": model.context_length,
        "documents": model.documents,
        "parameters": Classifier(model).n_params(),
        "positions": positions_of(config),
        "padding": padding_of(config),
        "changes": changes_of(config, None if before is None else read_run_config(before)),
        "block_size": None if model.mask.pattern == "dense" else model.mask.block_size,
        "density": model.mask.density(model.context_length, causal=False),
        "batch_size": optim.batch_size,
        "lr": optim.lr,
        "dtype": config.run.dtype,
        "starts": read_starts(folder),
        "curve": {
            "examples": [r["examples"] for r in evaluations],
            "val_accuracy": [100 * r["val_accuracy"] for r in evaluations],
        },
    }


def _pretraining(folder: Path, config: ClassifyConfig) -> Path | None:
    """The folder of the run that this one started with, which lies beside it; if any."""
    if config.run.init_from is None:
        return None
    before = folder.parent / Path(config.run.init_from).name
    if not is_finished(before):
        raise ValueError(
            f"{folder} started with the weights of {before}, which holds no finished run: what it "
            "took belongs in the report, so put it back"
        )
    return before


def positions_of(config: ClassifyConfig) -> str:
    """How the model is told where tokens stand."""
    model = config.model
    parts = {
        "none": [],
        "learned": ["learned"],
        "sinusoidal": ["sinusoids"],
        "row_column": ["waves of row and column"],
    }[model.embedding] + {
        "none": [],
        "sequence": ["rotary"],
        "axial": ["rotary by row and column"],
    }[model.rotary]
    if model.local_start:
        parts = [*parts, f"heads that begin at a neighbour, by {model.local_start:g}"]
    return ", ".join(parts) or "none"


def padding_of(config: ClassifyConfig) -> str:
    """What is padding, and what becomes of it."""
    if config.model.grid_width is None:
        return "after the text, hidden"
    if config.data.zeros == "padding":
        return "black pixels, left out"
    return "none, black pixels are tokens"


def changes_of(config: ClassifyConfig, before: ClassifyConfig | None = None) -> str:
    """What is done to training examples, and what comes before them: `before` on hidden tokens."""
    data = config.data
    parts = {"none": [], "mirror": ["mirrored"], "dihedral": ["turned and mirrored"]}[data.augment]
    if data.shift:
        parts = [*parts, f"moved by up to {data.shift}"]
    if data.phases:
        parts = [*parts, f"after {sum(phase.steps for phase in data.phases):,} steps on other sets"]
    if before is not None:
        steps, lr = before.optim.max_steps, before.optim.lr
        parts = [*parts, f"after {steps:,} steps on hidden tokens at a learning rate of {lr:g}"]
    return ", ".join(parts) or "as they are"


def _sharing(folder: Path) -> int | None:
    path = folder / JOBS_PER_GPU
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
