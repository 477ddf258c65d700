"""What a classifier's run may start with: data, a model, first weights, and its own checkpoints."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data.lra.store import Manifest
from model.classifier import Classifier
from model.positions import duplicate_gridwise
from model.token_predictor import TokenPredictor
from training.checkpoint.choice import chosen_checkpoint
from training.checkpoint.contents import shared_settings
from training.checkpoint.reader import Checkpoint
from training.classification.config import ClassifyConfig
from training.classification.scoring import BEST, read_best
from training.config import RUN_CONFIG
from training.tasks import config_of

AnyModel = Classifier | TokenPredictor
_ENCODER = "classifier."  # what names begin with in a TokenPredictor
_HEAD = ("head_in.", "head_out.")


def check_data(config: ClassifyConfig) -> None:
    """Refuse examples that are not prepared, or none for the model.

    Raises:
        ValueError, FileNotFoundError: how they differ, or what prepares them.
    """
    config.check_prepared()
    model = config.model
    for path in config.data.training_paths:
        there = Manifest.load(Path(path))
        needed = {
            "n_classes": there.n_classes,
            "documents": there.documents_per_example,
            "vocab_size": max(there.vocab_size, model.vocab_size),
        }
        if model.grid_width is not None and there.kind != "sequences":
            needed["grid_width"] = math.isqrt(there.max_length)
        for name, value in needed.items():
            if getattr(model, name) != value:
                raise ValueError(
                    f"model.{name}={getattr(model, name)} and {path} needs {value}: set it, or "
                    "train on other data"
                )


def make_model(config: ClassifyConfig) -> AnyModel:
    """The model of a run: one that predicts tokens where they are its objective."""
    if config.objective == "labels":
        return Classifier(config.model)
    return TokenPredictor(config.model, causal=config.objective == "causal")


def load_first_weights(
    folder: Path, model: AnyModel, choice: str | int | None = None
) -> tuple[str, int | None]:
    """Give `model` the best weights of another run, or those of a checkpoint of it.

    Learned positions are duplicated gridwise.

    Of a run that learned tokens, a Classifier takes all but what it cannot use: the vector of
    hidden tokens and the layer that predicts tokens are left out, and its own head stays as drawn.

    Returns:
        The file or folder that they are of; and the step of a checkpoint.

    Raises:
        ValueError, FileNotFoundError: that is no such run, or one of another model.
    """
    if (folder / RUN_CONFIG).is_file():
        config_of(folder, ClassifyConfig)  # a GPT's run is named as such
    if choice in (None, "best"):
        source, step, weights = folder / BEST, None, read_best(folder)
    else:
        source = chosen_checkpoint(folder, choice)
        checkpoint = Checkpoint.open(source)
        step, weights = checkpoint.progress.step, checkpoint.weights()
    here = model.state_dict()
    if isinstance(model, Classifier) and any(name.startswith(_ENCODER) for name in weights):
        encoder = {
            name.removeprefix(_ENCODER): weight
            for name, weight in weights.items()
            if name.startswith(_ENCODER)
        }
        weights = encoder | {n: weight for n, weight in here.items() if n.startswith(_HEAD)}
    classifier = model if isinstance(model, Classifier) else model.classifier
    grid_width = classifier.config.grid_width
    for name, learned in weights.items():
        if name.endswith("pos_emb") and grid_width is not None and len(learned) != grid_width**2:
            weights[name] = duplicate_gridwise(learned, grid_width)
    differing = sorted(
        name
        for name in weights.keys() | here.keys()
        if name not in weights or name not in here or weights[name].shape != here[name].shape
    )
    if differing:
        raise ValueError(
            f"run.init_from={folder} is a run of another model: {', '.join(differing)} differ. "
            "Use its values of model.*, and its objective unless this run's is labels, or start "
            "with other weights"
        )
    model.load_state_dict(weights)
    return str(source), step


def must_match(config: ClassifyConfig) -> dict[str, Any]:
    """What a run must share with the checkpoint that it goes on from."""
    data = {f"data.{k}": v for k, v in asdict(config.data).items()}
    for path in config.data.training_paths:
        arrays = Manifest.load(Path(path)).splits["train"].arrays
        data[f"sha256 of {path}"] = {name: array.sha256 for name, array in arrays.items()}
    learned = {
        "objective": config.objective,
        "hidden_share": config.hidden_share,
        "optim.batch_size": config.optim.batch_size,
    }
    return shared_settings(config) | data | learned
