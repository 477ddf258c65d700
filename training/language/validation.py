"""Loss over a whole validation set."""

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from data.text.batches import IGNORE
from training.distributed import Processes


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What one pass over a validation set gave."""

    loss: float
    """Mean negative log-likelihood of a token, nats."""
    tokens: int
    """Number of tokens scored."""

    @property
    def perplexity(self) -> float:
        """exp(loss), infinite where that is no float."""
        return math.inf if self.loss > 709 else math.exp(self.loss)  # NaN stays NaN


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor, Tensor | None]],
    processes: Processes,
    autocast: Callable[[], AbstractContextManager],
) -> Evaluation:
    """Token-weighted mean loss of `model` over the batches of all processes.

    Losses of a batch are summed in fp32, batches in fp64: the result does not depend on how many
    processes share the work beyond the rounding of the batches.

    Args:
        model: called as model(tokens, targets, doc_start=doc_start, reduction="sum").
        batches: this process's share, (tokens, targets, doc_start or None), each (B, T), on any
            device; as many on every process. Targets of IGNORE are not scored.
        autocast: makes the context for the forward pass.
    """
    training = model.training
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=processes.device)
    for batch in batches:
        tokens, targets, doc_start = (
            part if part is None else part.to(processes.device, non_blocking=True) for part in batch
        )
        with autocast():
            loss = model(tokens, targets, doc_start=doc_start, reduction="sum")
        total += torch.stack([loss.double(), (targets != IGNORE).sum().double()])
    model.train(training)
    loss_sum, n_tokens = processes.sum(total).tolist()
    return Evaluation(loss=loss_sum / n_tokens, tokens=int(n_tokens))
