"""Finished classifier runs of train.py, described for reports."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from model.classifier import Classifier
from training.classification.config import ClassifyConfig
from training.config import RUN_CONFIG
from training.environment import read_starts
from training.metrics import read_metrics
from training.tasks import config_of


def is_finished(folder: Path) -> bool:
    """Whether the run in `folder` has scored its best weights on the test split."""
    records = read_metrics(folder)
    return bool(records) and "test_accuracy" in records[-1]


def finished_folders(out: Path) -> Iterator[Path]:
    """Yield the folders of all finished runs of a sweep."""
    for folder in out.glob("*_seed*"):
        if (folder / RUN_CONFIG).exists() and is_finished(folder):
            yield folder


def read_run_config(folder: Path) -> ClassifyConfig:
    """Read the configuration of the run in `folder`."""
    return config_of(folder, ClassifyConfig)


def describe(folder: Path) -> dict[str, Any]:
    """Settings, cost and accuracy (percent) of a finished run, as JSON values."""
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


_POSITIONS = {
    "learned": "learned",
    "sinusoidal": "sinusoids",
    "row_column": "waves of row and column",
    "sequence": "rotary",
    "axial": "rotary by row and column",
}
"""Stored description of each embedding or rotary setting, except "none"."""
_AUGMENT = {"mirror": "mirrored", "dihedral": "turned and mirrored"}


_DISPLAYED = {
    "waves of row and column": "sinusoids of row and column",
    "rotary by row and column": "rotary in row and column",
    "heads that begin at a neighbour, by": "heads initialized to attend to a neighbour, strength",
    "after the text, hidden": "after the text, masked",
    ", left out": ", removed",
    "turned and mirrored": "rotated and mirrored",
    "moved by up to": "shifted by up to",
    "steps on other sets": "steps on other datasets",
    "as they are": "unmodified",
}


def display_description(stored: str) -> str:
    """Wording of a stored description in tables; merging reports compares the stored ones."""
    for wording, displayed in _DISPLAYED.items():
        stored = stored.replace(wording, displayed)
    return stored


def positions_of(config: ClassifyConfig) -> str:
    """Describe how the model encodes positions."""
    model = config.model
    parts = [_POSITIONS[name] for name in (model.embedding, model.rotary) if name != "none"]
    if model.local_start:
        parts.append(f"heads that begin at a neighbour, by {model.local_start:g}")
    return ", ".join(parts) or "none"


def padding_of(config: ClassifyConfig) -> str:
    """Describe the padding, and how it is handled."""
    if config.model.grid_width is None:
        return "after the text, hidden"
    if config.data.min_level > 1:
        return f"pixels below grey level {config.data.min_level}, left out"
    if config.data.zeros == "padding":
        return "black pixels, left out"
    return "none, black pixels are tokens"


def changes_of(config: ClassifyConfig, before: ClassifyConfig | None = None) -> str:
    """Describe augmentation and earlier training; `before` is the run on hidden tokens."""
    data = config.data
    parts = [] if data.augment == "none" else [_AUGMENT[data.augment]]
    if data.shift:
        parts.append(f"moved by up to {data.shift}")
    if data.phases:
        parts.append(f"after {sum(phase.steps for phase in data.phases):,} steps on other sets")
    if before is not None:
        steps, lr = before.optim.max_steps, before.optim.lr
        parts.append(f"after {steps:,} steps on hidden tokens at a learning rate of {lr:g}")
    return ", ".join(parts) or "as they are"
