"""How well a classifier does on a whole split, and the best weights so far."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional as F

from data.files import write_atomically
from training.distributed import Processes

BEST = "best.safetensors"


LabelledBatch = tuple[Tensor, Tensor | None, Tensor | None, Tensor]
"""Tokens, lengths and places as a classifier takes them, and the answers; `data.lra.batches.Batch`
is one."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """What one pass over a split gave."""

    loss: float
    """Mean cross-entropy of an example, nats."""
    accuracy: float
    """Share of examples whose largest logit is the label's."""
    logits: Tensor
    """(n, n_classes) float32 on the CPU, in the order of the examples."""


@torch.no_grad()
def score(
    model: nn.Module,
    batch: Callable[[Tensor], LabelledBatch],
    labels: Tensor,
    batch_size: int,
    processes: Processes,
    autocast: Callable[[], AbstractContextManager],
) -> Score:
    """Cross-entropy and accuracy on a whole split.

    Args:
        model: called as model(tokens, lengths, places), gives logits.
        batch: examples by their numbers, (batch_size,) int64 on the device.
        labels: (n,) int64 of all examples, on the device.
        batch_size: examples that one process takes at a time; the last are filled up, so that all
            batches have one shape, and what fills them is not counted.
        processes: share the work.
        autocast: makes the context for the forward pass.
    """
    training = model.training
    model.eval()
    n, device = len(labels), processes.device
    logits: Tensor | None = None
    step = batch_size * processes.world_size
    for start in range(processes.rank * batch_size, -(-n // step) * step, step):
        numbers = torch.arange(start, start + batch_size, device=device)
        tokens, lengths, places, _ = batch(numbers.clamp(max=n - 1))
        with autocast():
            found = model(tokens, lengths, places).float()
        if logits is None:
            logits = torch.zeros(n, found.shape[-1], device=device)
        here = max(0, min(batch_size, n - start))
        logits[start : start + here] = found[:here]
    model.train(training)
    assert logits is not None, "a split has at least one example"
    logits = processes.sum(logits)  # each process has zeros where others have logits
    loss = F.cross_entropy(logits.double(), labels).item()
    accuracy = (logits.argmax(-1) == labels).double().mean().item()
    return Score(loss=loss, accuracy=accuracy, logits=logits.cpu())


def save_best(run: Path, model: nn.Module, step: int, accuracy: float) -> None:
    """Keep the weights of the best validation so far in the folder of a run, in place of others."""
    weights = {name: weight.contiguous() for name, weight in model.state_dict().items()}
    about = {"step": json.dumps(step), "val_accuracy": json.dumps(accuracy)}
    write_atomically(run / BEST, save(weights, about))


def best_so_far(run: Path) -> tuple[int, float] | None:
    """Step and validation accuracy of the weights that `save_best` kept; None if there are none."""
    if not (run / BEST).exists():
        return None
    with safe_open(run / BEST, framework="pt") as file:
        about = file.metadata()
    return json.loads(about["step"]), json.loads(about["val_accuracy"])


def read_best(run: Path) -> dict[str, Tensor]:
    """The weights that `save_best` kept, by their names in the model, on the CPU.

    Raises:
        FileNotFoundError: there are none.
    """
    if not (run / BEST).exists():
        raise FileNotFoundError(
            f"{run} has no {BEST}: name the folder of a classifier's run that was validated once"
        )
    with safe_open(run / BEST, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
