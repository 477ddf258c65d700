"""Training objectives of a classifier, and their loss: labels of examples, or their tokens.

Token objectives follow "Never Train From Scratch" (Amos, Berant and Gupta, ICLR 2024, arXiv
2310.02980, section 2): predict randomly hidden tokens, or each next token.
Shapes: B examples, R rows (B times the documents of an example), T tokens.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from data.randomness import fixed_chance
from training.classification.config import Objective
from training.distributed import Processes

LabelledBatch = tuple[Tensor, Tensor | None, Tensor | None, Tensor]
"""Tokens, lengths and positions, as a classifier takes them, and labels, as in
`data.lra.batches.Batch`."""


class Targets(NamedTuple):
    """Model inputs and prediction targets."""

    inputs: tuple[Tensor | None, ...]
    """Positional arguments of the model."""
    targets: Tensor
    """(B,) or (R, T) integers: the shape of the model's logits without the last dimension."""
    mask: Tensor | None = None
    """(R, T) bool, targets that count in the loss; None: all."""

    def sums(self, logits: Tensor) -> Tensor:
        """Sum loss, correct predictions and number of targets per example or row.

        Args:
            logits: (B, n_classes) or (R, T, vocab_size), output of the model.

        Returns:
            (3, B) or (3, R) float32: sum of the cross-entropy in nats, with a gradient; number of
            targets that have the largest logit; number of targets.
        """
        targets = self.targets.long()
        flat = logits.flatten(0, -2).float(), targets.flatten()
        losses = F.cross_entropy(*flat, reduction="none").view_as(targets)
        correct = logits.argmax(-1) == targets
        mask = torch.ones_like(losses) if self.mask is None else self.mask.float()
        values = torch.stack((losses * mask, correct * mask, mask))
        return values.flatten(2).sum(2) if values.dim() > 2 else values


TargetFunction = Callable[[LabelledBatch, Tensor | None], Targets]
"""Function that makes inputs and targets from a batch.

The second argument, (B,) int64, has the indices of the examples and seeds all random choices; None
draws them from torch's generator of the device. The function never waits for the device and its
shapes are constant, so it can be captured in a CUDA graph.
"""


def target_loss(
    targets_of: TargetFunction,
    activations: Callable[[], AbstractContextManager],
    processes: Processes,
    model: nn.Module,
    batch: LabelledBatch,
) -> tuple[Tensor, Tensor]:
    """Mean loss, nats, and accuracy over the targets of all processes.

    Processes may have different numbers of targets, so each divides by the mean number.

    Args:
        targets_of: makes the model's inputs and the targets.
        activations: creates the context of the forward pass.
        processes: all processes that train together.
        model: called with the inputs; returns logits.
        batch: batch of this process.
    """
    targets = targets_of(batch, None)
    with activations():
        logits = model(*targets.inputs)
    loss_sum, n_correct, n_targets = targets.sums(logits).sum(1)
    n_targets = processes.sum(n_targets.detach().clone()) / processes.world_size
    # Avoid a division by zero: rows of one token each have no targets. The minimum is not 1: one
    # target in all processes together is a mean below 1.
    n_targets = n_targets.clamp(min=1 / processes.world_size)
    # Gradients and mean losses are averaged over processes afterwards.
    return loss_sum / n_targets, n_correct / n_targets


def make_target_function(objective: Objective, hidden_share: float) -> TargetFunction:
    """Function that makes inputs and targets for an objective; `hidden_share` is for `masked`."""
    if objective == "masked":
        return partial(masked_token_targets, share=hidden_share)
    return next_token_targets if objective == "causal" else label_targets


def label_targets(batch: LabelledBatch, numbers: Tensor | None = None) -> Targets:
    """Targets of a `Classifier`: the label of each example."""
    *inputs, labels = batch
    return Targets(tuple(inputs), labels)


def next_token_targets(batch: LabelledBatch, numbers: Tensor | None = None) -> Targets:
    """Targets of a causal `TokenPredictor`: the next token, for all tokens but a row's last."""
    tokens, lengths, positions, _ = batch
    mask = _token_mask(tokens, lengths, n_excluded=1)
    return Targets((tokens, lengths, positions), tokens.roll(-1, dims=1), mask)


def masked_token_targets(
    batch: LabelledBatch, numbers: Tensor | None = None, *, share: float
) -> Targets:
    """Targets of a `TokenPredictor`: tokens hidden from it, each with probability `share`.

    Padding is never hidden and never a target.
    """
    tokens, lengths, positions, _ = batch
    if numbers is None:
        uniform = torch.rand(tokens.shape, device=tokens.device)
    else:
        documents = torch.arange(len(tokens) // len(numbers), device=numbers.device)
        rows = (numbers[:, None] * len(documents) + documents).flatten()
        uniform = fixed_chance(rows, tokens.shape[1])
    hidden = (uniform < share) & _token_mask(tokens, lengths)
    return Targets((tokens, lengths, positions, hidden), tokens, hidden)


def _token_mask(tokens: Tensor, lengths: Tensor | None, *, n_excluded: int = 0) -> Tensor:
    """(R, T) bool: True except for padding and the last `n_excluded` tokens of each row."""
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    end = tokens.shape[1] if lengths is None else lengths[:, None]
    return (columns < end - n_excluded).expand(tokens.shape)
