"""Evaluate a model on a whole split, and store the best weights so far."""

import hashlib
import json
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from data.files import is_present, parse_json, write_atomically
from data.tensor_files import declared_shapes
from training.classification.objectives import LabelledBatch, TargetFunction, label_targets
from training.distributed import Processes

BEST = "best.safetensors"
TEST_LOGITS = "test_logits.npy"


@dataclass(frozen=True, kw_only=True)
class Score:
    """Result of an evaluation on a split."""

    loss: float
    """Mean cross-entropy of a target, nats."""
    accuracy: float
    """Share of targets (labels or tokens) that have the largest logit."""
    n_examples: int
    """Number of examples evaluated."""
    logits: Tensor | None
    """(n_examples, n_classes) float32 on the CPU, in the order of the examples; None if tokens are
    predicted, whose logits would be too large."""


@torch.no_grad()
def score(
    model: nn.Module,
    batch: Callable[[Tensor], LabelledBatch],
    n_examples: int,
    batch_size: int,
    processes: Processes,
    activations: Callable[[], AbstractContextManager],
    targets_of: TargetFunction = label_targets,
    between: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> Score:
    """Compute cross-entropy and accuracy on a whole split.

    Args:
        model: called with the inputs from `targets_of`; returns logits.
        batch: returns examples by their indices, (batch_size,) int64 on the device.
        n_examples: number of examples in the split.
        batch_size: examples per forward pass of a process. The last batch is padded, so that all
            have one shape; padding is not counted.
        processes: all processes, which share the batches.
        activations: creates the context of the forward pass.
        targets_of: makes inputs and targets from a batch, the same each time.
        between: wraps the iteration over batches, the same number on every process.
    """
    training = model.training
    model.eval()
    device = processes.device
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    logits: Tensor | None = None
    step = batch_size * processes.world_size
    for start in between(range(processes.rank * batch_size, -(-n_examples // step) * step, step)):
        numbers = torch.arange(start, start + batch_size, device=device).clamp(max=n_examples - 1)
        targets = targets_of(batch(numbers), numbers)
        with activations():
            outputs = model(*targets.inputs).float()
        n_valid = max(0, min(batch_size, n_examples - start))
        row_sums = targets.sums(outputs)
        sums += row_sums[:, : n_valid * (row_sums.shape[1] // batch_size)].double().sum(1)
        if outputs.dim() == 2:
            if logits is None:
                logits = torch.zeros(n_examples, outputs.shape[-1], device=device)
            logits[start : start + n_valid] = outputs[:n_valid]
    model.train(training)
    loss_sum, n_correct, n_targets = processes.sum(sums).tolist()
    if logits is not None:
        logits = processes.sum(logits).cpu()  # each process has zeros where others have logits
    # There may be no targets, if each row has only one token.
    return Score(
        loss=loss_sum / max(n_targets, 1),
        accuracy=n_correct / max(n_targets, 1),
        n_examples=n_examples,
        logits=logits,
    )


def save_best(run: Path, model: nn.Module, step: int, accuracy: float) -> None:
    """Save the weights with the best validation accuracy so far, replacing earlier ones."""
    weights = {name: weight.contiguous() for name, weight in model.state_dict().items()}
    metadata = {"step": json.dumps(step), "val_accuracy": json.dumps(accuracy)}
    metadata["sha256"] = _sha256(weights, metadata)
    write_atomically(run / BEST, save(weights, metadata))


def best_so_far(run: Path) -> tuple[int, float] | None:
    """Step and validation accuracy of the weights saved by `save_best`; None if there are none."""
    if not is_present(run / BEST):
        return None
    _, step, accuracy = _read(run / BEST)
    return step, accuracy


def read_best(run: Path) -> dict[str, Tensor]:
    """Read the weights saved by `save_best`, by their names in the model, on the CPU.

    Raises:
        FileNotFoundError: the run has none.
        ValueError: the file is damaged.
    """
    if not (run / BEST).exists():
        raise FileNotFoundError(
            f"{run} has no {BEST}. Give the folder of a classifier's run that was validated at "
            "least once"
        )
    return _read(run / BEST)[0]


def _read(path: Path) -> tuple[dict[str, Tensor], int, float]:
    """Read the weights with their step and validation accuracy."""
    try:
        declared_shapes(path)
        with safe_open(path, framework="pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
        # Files of version 0.2 or older have no sha256.
        if metadata.pop("sha256", None) not in (None, _sha256(weights, metadata)):
            raise ValueError("its sha256 does not match its contents")
        step, accuracy = (
            parse_json(metadata.get(name, "null")) for name in ("step", "val_accuracy")
        )
        if type(step) is not int or type(accuracy) is not float or not 0 <= accuracy <= 1:
            raise ValueError("its step or val_accuracy is missing or invalid")
    except (SafetensorError, ValueError) as error:
        raise ValueError(
            f"{path} is damaged ({error}). Copy it again, or repeat the run"
        ) from error
    return weights, step, accuracy


def _sha256(weights: dict[str, Tensor], metadata: dict[str, str]) -> str:
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name, weight in sorted(weights.items()):
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)} ".encode())
        digest.update(weight.cpu().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
