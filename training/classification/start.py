"""Prepare a classifier's run: check its data, create its model, load initial weights."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data.lra.store import Manifest
from model.classifier import Classifier
from model.positions import duplicate_gridwise
from model.token_predictor import TokenPredictor
from training.checkpoint.choice import find_checkpoint
from training.checkpoint.contents import shared_settings
from training.checkpoint.reader import Checkpoint
from training.classification.config import ClassifyConfig
from training.classification.scoring import BEST, read_best
from training.config import RUN_CONFIG
from training.tasks import config_of

AnyModel = Classifier | TokenPredictor
_ENCODER = "classifier."  # prefix of the encoder's weights in a TokenPredictor
_HEAD = ("head_in.", "head_out.")


def check_data(config: ClassifyConfig) -> None:
    """Check that the examples are prepared and fit the model.

    Raises:
        FileNotFoundError: some are missing; the message has the commands that prepare them.
        ValueError: they do not fit the model; the message names the setting to change.
    """
    config.check_prepared()
    model = config.model
    for path in config.data.training_paths:
        manifest = Manifest.load(Path(path))
        needed = {
            "n_classes": manifest.n_classes,
            "documents": manifest.documents_per_example,
            "vocab_size": max(manifest.vocab_size, model.vocab_size),
        }
        if model.grid_width is not None and manifest.kind != "sequences":
            needed["grid_width"] = math.isqrt(manifest.max_length)
        for name, value in needed.items():
            if getattr(model, name) != value:
                raise ValueError(
                    f"model.{name}={getattr(model, name)} must be {value} for the data in {path}. "
                    f"Set model.{name}={value}, or train on other data"
                )


def make_model(config: ClassifyConfig) -> AnyModel:
    """Create the model: a `Classifier` for labels, a `TokenPredictor` for token objectives."""
    if config.objective == "labels":
        return Classifier(config.model)
    return TokenPredictor(config.model, causal=config.objective == "causal")


def load_initial_weights(
    folder: Path, model: AnyModel, choice: str | int | None = None
) -> tuple[str, int | None]:
    """Load the best weights of another run, or those of one of its checkpoints, into `model`.

    Learned positions are duplicated gridwise. From a run that predicted tokens, a Classifier takes
    only the encoder. It skips the vector of hidden tokens and the output layer for tokens. Its own
    head stays as it was initialized.

    Returns:
        The file or folder of the weights; and the step, if it is a checkpoint.

    Raises:
        ValueError, FileNotFoundError: the folder has no such weights, or they are of another model.
    """
    if (folder / RUN_CONFIG).is_file():
        config_of(folder, ClassifyConfig)  # raises a clear error for a GPT's run
    if choice in (None, "best"):
        source, step, weights = folder / BEST, None, read_best(folder)
    else:
        source = find_checkpoint(folder, choice)
        checkpoint = Checkpoint.open(source)
        step, weights = checkpoint.progress.step, checkpoint.weights()
    own = model.state_dict()
    if isinstance(model, Classifier) and any(name.startswith(_ENCODER) for name in weights):
        encoder = {
            name.removeprefix(_ENCODER): weight
            for name, weight in weights.items()
            if name.startswith(_ENCODER)
        }
        weights = encoder | {n: weight for n, weight in own.items() if n.startswith(_HEAD)}
    classifier = model if isinstance(model, Classifier) else model.classifier
    grid_width = classifier.config.grid_width
    for name, learned in weights.items():
        if name.endswith("pos_emb") and grid_width is not None and len(learned) != grid_width**2:
            weights[name] = duplicate_gridwise(learned, grid_width)
    differing = sorted(
        name
        for name in weights.keys() | own.keys()
        if name not in weights or name not in own or weights[name].shape != own[name].shape
    )
    if differing:
        raise ValueError(
            f"run.init_from={folder} has another model: {', '.join(differing)} differ. Use its "
            "values of model.*, and its objective unless this run has objective=labels, or start "
            "from other weights"
        )
    model.load_state_dict(weights)
    return str(source), step


def must_match(config: ClassifyConfig) -> dict[str, Any]:
    """Settings and data that must match a checkpoint to resume from it."""
    data = {f"data.{k}": v for k, v in asdict(config.data).items()}
    for path in config.data.training_paths:
        arrays = Manifest.load(Path(path)).splits["train"].arrays
        data[f"sha256 of {path}"] = {name: array.sha256 for name, array in arrays.items()}
    objective = {
        "objective": config.objective,
        "hidden_share": config.hidden_share,
        "optim.batch_size": config.optim.batch_size,
    }
    return shared_settings(config) | data | objective
