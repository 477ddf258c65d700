"""Losses that a run has been scored with, kept in its folder: RUN/scores/CORPUS/SCORING.npz."""

import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from data.files import write_atomically
from data.text.shards import TokenStream
from evaluation.runs import Run
from evaluation.sums import DAMAGED, sha256_of
from evaluation.windows import Scoring
from model.config import ModelConfig

SCORES = "scores"


def read_losses(run: Run, stream: TokenStream, scoring: Scoring) -> np.ndarray | None:
    """What `write_losses` kept, or None if that was another checkpoint's, or never was.

    Raises:
        ValueError: the file is damaged.
    """
    path = _path(run, stream, scoring)
    if not path.exists():
        return None
    origin = _origin(run, stream)
    content = io.BytesIO(path.read_bytes())
    try:
        with np.load(content, allow_pickle=False) as saved:
            if str(saved["origin"]) != origin:
                return None
            losses = saved["losses"]
        if losses.shape != (len(stream),):
            raise ValueError(f"losses of {losses.shape} instead of {len(stream)} tokens")
        return losses
    except DAMAGED as error:
        raise ValueError(
            f"{path} is damaged ({error}): copy it again, or remove it to score again"
        ) from error


def write_losses(run: Run, stream: TokenStream, scoring: Scoring, losses: np.ndarray) -> None:
    """Keep (n_tokens,) float32 losses, whole or not at all."""
    path = _path(run, stream, scoring)
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    np.savez(buffer, losses=losses, origin=np.array(_origin(run, stream)))
    write_atomically(path, buffer.getvalue())


def _path(run: Run, stream: TokenStream, scoring: Scoring) -> Path:
    return run.folder / SCORES / stream.path.resolve().name / f"{scoring.name}.npz"


def _origin(run: Run, stream: TokenStream) -> str:
    """What the losses depend on beside the scoring."""
    return json.dumps(
        {
            # Not just the step: a run that was trained anew took another time.
            "progress": asdict(run.progress),
            "model": _without_defaults(run.config.model),
            "dtype": run.config.run.dtype,
            "text": sha256_of(stream),
        }
    )


def _without_defaults(config: ModelConfig) -> dict[str, Any]:
    """The fields that make a model another one; a field that is new has its default in old runs."""
    defaults = asdict(ModelConfig())
    return {name: value for name, value in asdict(config).items() if value != defaults[name]}
