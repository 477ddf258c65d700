"""The loss of every token of a validation set, which RUN/scores/CORPUS/SCORING.npz keeps."""

import io
import json
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from data.files import write_atomically
from data.text.shards import TokenStream
from evaluation.runs import Run
from evaluation.sums import DAMAGED, sha256_of
from evaluation.windows import Scoring
from model.config import ModelConfig
from training.distributed import Processes

SCORES = "scores"


@torch.no_grad()
def token_losses(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor, Tensor | None, Tensor]],
    n_tokens: int,
    processes: Processes,
    autocast: Callable[[], AbstractContextManager],
) -> np.ndarray:
    """(n_tokens,) float32 losses by position in the stream, NaN where nothing was scored.

    Args:
        model: called as model(tokens, targets, doc_start=doc_start, reduction="none"); in the mode
            it is to be evaluated in.
        batches: this process's share, as many on every process; see `ScoringBatch`.
        n_tokens: length of the stream.
        processes: all of them get the losses of all.
        autocast: makes the context for the forward pass.

    Raises:
        FloatingPointError: a loss is not finite.
        AssertionError: a position was scored twice.
    """
    device = processes.device
    losses = torch.zeros(n_tokens, dtype=torch.float32, device=device)
    scored = torch.zeros(n_tokens, dtype=torch.int32, device=device)
    for *inputs, positions in batches:
        tokens, targets, doc_start = (
            None if part is None else part.to(device, non_blocking=True) for part in inputs
        )
        with autocast():
            loss = model(tokens, targets, doc_start=doc_start, reduction="none")
        where = positions.to(device).flatten()
        losses[where] = loss[: len(positions)].flatten().float()
        scored.index_add_(0, where, torch.ones_like(where, dtype=scored.dtype))
    processes.sum(losses)
    processes.sum(scored)
    assert int(scored.max()) <= 1, "a position was scored twice"
    n_broken = int((~losses.isfinite()).sum())
    if n_broken:
        raise FloatingPointError(
            f"the losses of {n_broken:,} of {int(scored.sum()):,} tokens are not finite: the model "
            "is broken. Move its newest checkpoint away, and the one before it is evaluated"
        )
    return torch.where(scored == 1, losses, torch.nan).cpu().numpy()


def read_losses(run: Run, stream: TokenStream, scoring: Scoring) -> np.ndarray | None:
    """Losses that `write_losses` kept, or None if they are of another checkpoint, or not there.

    Raises:
        ValueError: the file is damaged.
    """
    path = _path(run, stream, scoring)
    if not path.exists():
        return None
    origin = _origin(run, stream)
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as saved:
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
    """All that losses depend on beside the scoring."""
    defaults = asdict(ModelConfig())  # which old runs have for a field that is new
    model = asdict(run.config.model).items()
    return json.dumps(
        {
            # Not just the step: a run that was trained anew took another time.
            "progress": asdict(run.progress),
            "model": {name: value for name, value in model if value != defaults[name]},
            "dtype": run.config.run.dtype,
            "text": sha256_of(stream),
        }
    )
