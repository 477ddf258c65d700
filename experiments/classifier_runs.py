"""Runs of train.py on classifiers: how sweeps start them, and what reports tell of them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from configs.reader import read_config
from evaluation.runs import HOW, check_settings
from experiments.gpu_pool import Task, python_command
from model.classifier import Classifier
from training.classification.config import ClassifyConfig
from training.config import RUN_CONFIG
from training.environment import read_starts
from training.metrics import read_metrics


@dataclass(frozen=True, kw_only=True)
class ClassifierRun:
    """One run of a sweep, by its folder and its arguments."""

    seed: int
    folder: Path
    arguments: tuple[str, ...]
    """Of train.py."""
    needs: frozenset[str] = frozenset()
    """Names of the runs that come before."""

    @cached_property
    def config(self) -> ClassifyConfig:
        """What the arguments mean."""
        return read_config(ClassifyConfig, self.arguments)

    @property
    def is_finished(self) -> bool:
        """Whether its best weights were scored on the test split."""
        return is_finished(self.folder)

    def check_folder(self) -> None:
        """Raise ValueError where the folder holds a run with other settings."""
        if (self.folder / RUN_CONFIG).exists():
            check_settings(self.folder, read_run_config(self.folder), self.config, may_differ=HOW)

    def gpu_task(
        self, waiting: Sequence["ClassifierRun"], started: Callable[[Path], object] = lambda _: None
    ) -> Task:
        """Train, or go on, and score the best weights.

        Args:
            waiting: all runs of this call.
            started: called with the folder when the run starts.
        """

        def commands(n_gpu: int) -> list[list[str]]:
            started(self.folder)
            return [python_command(n_gpu, "train.py", *self.arguments)]

        return Task(
            name=self.folder.name,
            needs=self.needs & {run.folder.name for run in waiting},
            commands=commands,
            log=self.folder.with_suffix(".log"),
        )


def refuse_overrides(overrides: Sequence[str], options: Mapping[str, str]) -> None:
    """Raise ValueError where --set names a setting that one of the sweep's options decides."""
    for override in overrides:
        key = override.partition("=")[0]
        if key in options:
            raise ValueError(
                f"--set {override}: the sweep itself sets {key} for each run, take {options[key]}"
            )


def is_finished(folder: Path) -> bool:
    """Whether the run in `folder` has come to its end, the score on the test split."""
    records = read_metrics(folder)
    return bool(records) and "test_accuracy" in records[-1]


def finished_folders(out: Path) -> Iterator[Path]:
    """Folders of all finished runs of a sweep."""
    for folder in out.glob("*_seed*"):
        if (folder / RUN_CONFIG).exists() and is_finished(folder):
            yield folder


def read_run_config(folder: Path) -> ClassifyConfig:
    """The configuration of the run in `folder`."""
    return read_config(ClassifyConfig, [str(folder / RUN_CONFIG)])


def describe(folder: Path) -> dict[str, Any]:
    """Settings, cost and accuracy (percent) of a finished run, as JSON can hold them."""
    config, records = read_run_config(folder), read_metrics(folder)
    last, model = records[-1], config.model
    evaluations = [record for record in records if "val_accuracy" in record]
    return {
        "seed": config.run.seed,
        "test_accuracy": 100 * last["test_accuracy"],
        "test_examples": last["test_examples"],
        "best_step": last["best_step"],
        "best_val_accuracy": 100 * last["best_val_accuracy"],
        "steps": last["step"],
        "examples": last["examples"],
        "minutes": 60 * last["gpu_hours"],
        "parameters": Classifier(model).n_params(),
        "positions": positions_of(config),
        "padding": padding_of(config),
        "density": model.mask.density(model.context_length, causal=False),
        "batch_size": config.optim.batch_size,
        "lr": config.optim.lr,
        "starts": read_starts(folder),
        "curve": {
            "examples": [record["examples"] for record in evaluations],
            "val_accuracy": [100 * record["val_accuracy"] for record in evaluations],
        },
    }


_EMBEDDINGS = {
    "none": (),
    "learned": ("learned",),
    "sinusoidal": ("sinusoids",),
    "row_column": ("waves of row and column",),
}
_ROTARY = {"none": (), "sequence": ("rotary",), "axial": ("rotary by row and column",)}
_AUGMENT = {"none": (), "mirror": ("mirrored",), "dihedral": ("turned and mirrored",)}


def positions_of(config: ClassifyConfig) -> str:
    """How the model is told where tokens stand."""
    model = config.model
    parts = [*_EMBEDDINGS[model.embedding], *_ROTARY[model.rotary]]
    if model.local_start:
        parts.append(f"heads that begin at a neighbour, by {model.local_start:g}")
    return ", ".join(parts) or "none"


def padding_of(config: ClassifyConfig) -> str:
    """What is padding, and what becomes of it."""
    if config.model.grid_width is None:
        return "after the text, hidden"
    if config.data.zeros == "padding":
        return "black pixels, left out"
    return "none, black pixels are tokens"


def changes_of(config: ClassifyConfig, before: ClassifyConfig | None = None) -> str:
    """Changes to the training examples, and training before them: `before` on hidden tokens."""
    data = config.data
    parts = [*_AUGMENT[data.augment]]
    if data.shift:
        parts.append(f"moved by up to {data.shift}")
    if data.phases:
        parts.append(f"after {sum(phase.steps for phase in data.phases):,} steps on other sets")
    if before is not None:
        steps, lr = before.optim.max_steps, before.optim.lr
        parts.append(f"after {steps:,} steps on hidden tokens at a learning rate of {lr:g}")
    return ", ".join(parts) or "as they are"
