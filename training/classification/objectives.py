"""Objectives of a classifier and their loss: the labels of examples, or their own tokens.

Tokens are those of "Never Train From Scratch" (Amos, Berant and Gupta, ICLR 2024, arXiv 2310.02980,
section 2): hidden ones, chosen at random, or each from those before it.
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
"""Tokens, lengths and places as a classifier takes them, and its answers; `data.lra.batches.Batch`
is one."""


class Question(NamedTuple):
    """What a model is given, and what it should answer."""

    inputs: tuple[Tensor | None, ...]
    """The model is called with these."""
    answers: Tensor
    """(B,) or (R, T) integers: the shape of the model's logits but for their last dimension."""
    counted: Tensor | None = None
    """(R, T) bool, the answers that are asked for; None: all."""

    def marks(self, logits: Tensor) -> Tensor:
        """How good the answers are.

        Args:
            logits: (B, n_classes) or (R, T, vocab_size), what the model gave.

        Returns:
            (3, B) or (3, R) float32, sums over the answers of an example or row: cross-entropy in
            nats, which has a gradient; how many have the largest logit; how many there are.
        """
        answers = self.answers.long()
        flat = logits.flatten(0, -2).float(), answers.flatten()
        losses = F.cross_entropy(*flat, reduction="none").view_as(answers)
        right = logits.argmax(-1) == answers
        counted = torch.ones_like(losses) if self.counted is None else self.counted.float()
        marks = torch.stack((losses * counted, right * counted, counted))
        return marks.flatten(2).sum(2) if marks.dim() > 2 else marks


Ask = Callable[[LabelledBatch, Tensor | None], Question]
"""Makes a question of a batch.

The second argument, (B,) int64, the numbers of its examples, fixes what is left to chance; None
draws it from torch's generator of the device. Nothing waits for the device, and shapes do not vary:
it may be captured in a graph.
"""


def answer_loss(
    ask: Ask,
    activations: Callable[[], AbstractContextManager],
    processes: Processes,
    model: nn.Module,
    batch: LabelledBatch,
) -> tuple[Tensor, Tensor]:
    """Mean loss, nats, and accuracy over the answers of all processes.

    Processes may have different numbers of answers, so each divides by their mean number.

    Args:
        ask: makes the model's inputs and the answers.
        activations: makes the context of the forward pass.
        processes: that train together.
        model: called with the inputs; gives logits.
        batch: of this process.
    """
    question = ask(batch, None)
    with activations():
        logits = model(*question.inputs)
    loss_sum, n_right, n_answers = question.marks(logits).sum(1)
    n_answers = processes.sum(n_answers.detach().clone()) / processes.world_size
    # Rows of one token each have no answers at all. One answer of several processes is still less
    # than one for each of them.
    n_answers = n_answers.clamp(min=1 / processes.world_size)
    # Gradients and means of the loss are averaged over processes afterwards.
    return loss_sum / n_answers, n_right / n_answers


def make_ask(objective: Objective, hidden_share: float) -> Ask:
    """The questions of an objective; `hidden_share` is that of `masked`."""
    if objective == "masked":
        return partial(ask_hidden, share=hidden_share)
    return ask_following if objective == "causal" else ask_labels


def ask_labels(batch: LabelledBatch, numbers: Tensor | None = None) -> Question:
    """Of a `Classifier`: the label of each example."""
    *inputs, labels = batch
    return Question(tuple(inputs), labels)


def ask_following(batch: LabelledBatch, numbers: Tensor | None = None) -> Question:
    """Of a causal `TokenPredictor`: what comes after each token but a row's last."""
    tokens, lengths, places, _ = batch
    return Question(
        (tokens, lengths, places), tokens.roll(-1, dims=1), _within(tokens, lengths, less=1)
    )


def ask_hidden(batch: LabelledBatch, numbers: Tensor | None = None, *, share: float) -> Question:
    """Of a `TokenPredictor`: the tokens that are hidden from it, each with probability `share`.

    Padding is neither hidden nor asked for.
    """
    tokens, lengths, places, _ = batch
    if numbers is None:
        chance = torch.rand(tokens.shape, device=tokens.device)
    else:
        documents = torch.arange(len(tokens) // len(numbers), device=numbers.device)
        rows = (numbers[:, None] * len(documents) + documents).flatten()
        chance = fixed_chance(rows, tokens.shape[1])
    hidden = (chance < share) & _within(tokens, lengths)
    return Question((tokens, lengths, places, hidden), tokens, hidden)


def _within(tokens: Tensor, lengths: Tensor | None, *, less: int = 0) -> Tensor:
    """(R, T) bool: which tokens are no padding, and not the last `less` of their row."""
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    end = tokens.shape[1] if lengths is None else lengths[:, None]
    return (columns < end - less).expand(tokens.shape)
