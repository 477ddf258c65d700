"""How well a model answers on a whole split, and the best weights so far."""

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
from training.classification.objectives import Ask, LabelledBatch, ask_labels
from training.distributed import Processes

BEST = "best.safetensors"
TEST_LOGITS = "test_logits.npy"


@dataclass(frozen=True, kw_only=True)
class Score:
    """What one pass over a split gave."""

    loss: float
    """Mean cross-entropy of an answer, nats."""
    accuracy: float
    """Share of answers that have the largest logit: of labels, or of predicted tokens."""
    n_examples: int
    """Examples that were asked about."""
    logits: Tensor | None
    """(n_examples, n_classes) float32 on the CPU, in their order; None where tokens are predicted,
    of which there are too many."""


@torch.no_grad()
def score(
    model: nn.Module,
    batch: Callable[[Tensor], LabelledBatch],
    n_examples: int,
    batch_size: int,
    processes: Processes,
    activations: Callable[[], AbstractContextManager],
    ask: Ask = ask_labels,
    between: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> Score:
    """Cross-entropy and accuracy on a whole split.

    Args:
        model: called with what `ask` gives it, gives logits.
        batch: examples by their numbers, (batch_size,) int64 on the device.
        batch_size: examples that one process takes at a time; the last are filled up, so that all
            batches have one shape, and what fills them is not counted.
        activations: makes the context for the forward pass.
        ask: makes a question of each batch, the same each time.
        between: goes through the batches, the same number on every process.
    """
    training = model.training
    model.eval()
    device = processes.device
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    logits: Tensor | None = None
    step = batch_size * processes.world_size
    for start in between(range(processes.rank * batch_size, -(-n_examples // step) * step, step)):
        numbers = torch.arange(start, start + batch_size, device=device).clamp(max=n_examples - 1)
        question = ask(batch(numbers), numbers)
        with activations():
            found = model(*question.inputs).float()
        here = max(0, min(batch_size, n_examples - start))
        marks = question.marks(found)
        sums += marks[:, : here * (marks.shape[1] // batch_size)].double().sum(1)
        if found.dim() == 2:
            if logits is None:
                logits = torch.zeros(n_examples, found.shape[-1], device=device)
            logits[start : start + here] = found[:here]
    model.train(training)
    loss_sum, n_right, n_answers = processes.sum(sums).tolist()
    if logits is not None:
        logits = processes.sum(logits).cpu()  # each process has zeros where others have logits
    # of rows of one token each, none may be asked for
    return Score(
        loss=loss_sum / max(n_answers, 1),
        accuracy=n_right / max(n_answers, 1),
        n_examples=n_examples,
        logits=logits,
    )


def save_best(run: Path, model: nn.Module, step: int, accuracy: float) -> None:
    """Keep the weights of the best validation so far in the folder of a run, in place of others."""
    weights = {name: weight.contiguous() for name, weight in model.state_dict().items()}
    about = {"step": json.dumps(step), "val_accuracy": json.dumps(accuracy)}
    about["sha256"] = _sha256(weights, about)
    write_atomically(run / BEST, save(weights, about))


def best_so_far(run: Path) -> tuple[int, float] | None:
    """Step and validation accuracy of the weights that `save_best` kept; None if there are none."""
    if not is_present(run / BEST):
        return None
    _, step, accuracy = _read(run / BEST)
    return step, accuracy


def read_best(run: Path) -> dict[str, Tensor]:
    """The weights that `save_best` kept, by their names in the model, on the CPU.

    Raises:
        FileNotFoundError: there are none.
        ValueError: the file is damaged.
    """
    if not (run / BEST).exists():
        raise FileNotFoundError(
            f"{run} has no {BEST}: name the folder of a classifier's run that was validated once"
        )
    return _read(run / BEST)[0]


def _read(path: Path) -> tuple[dict[str, Tensor], int, float]:
    """Weights, and the step and the accuracy that they had."""
    try:
        declared_shapes(path)
        with safe_open(path, framework="pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            about = file.metadata() or {}
        # None: of version 0.2 or older
        if about.pop("sha256", None) not in (None, _sha256(weights, about)):
            raise ValueError("its sha256 is not that of what it holds")
        step, accuracy = (parse_json(about.get(name, "null")) for name in ("step", "val_accuracy"))
        if type(step) is not int or type(accuracy) is not float or not 0 <= accuracy <= 1:
            raise ValueError("it does not tell of a step and a val_accuracy")
    except (SafetensorError, ValueError) as error:
        raise ValueError(
            f"{path} is damaged ({error}): copy it again, or train the run anew"
        ) from error
    return weights, step, accuracy


def _sha256(weights: dict[str, Tensor], about: dict[str, str]) -> str:
    found = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, weight in sorted(weights.items()):
        found.update(f"{name} {weight.dtype} {tuple(weight.shape)} ".encode())
        found.update(weight.cpu().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()
