"""One step of a classifier's training, from a batch to new weights."""

from collections.abc import Callable
from contextlib import AbstractContextManager

from torch import nn

from training.classification.objectives import Ask, LabelledBatch, ask_labels
from training.finite_steps import FiniteSteps


class ClassifierStep:
    """Gradients and the optimizer, with nothing in between that waits for the GPU.

    The model is called with what `ask` gives it, and gives logits. `activations` makes the context
    of the forward pass. `finite` takes the step, and is given the mean loss and accuracy of the
    batch's answers.
    """

    def __init__(
        self,
        model: nn.Module,
        finite: FiniteSteps,
        activations: Callable[[], AbstractContextManager],
        *,
        ask: Ask = ask_labels,
    ) -> None:
        self._model, self._finite, self._activations = model, finite, activations
        self._ask = ask

    def __call__(self, batch: LabelledBatch) -> None:
        """Take the step; of several processes each takes the mean of its own answers."""
        question = self._ask(batch, None)
        self._finite.optimizer.zero_grad(set_to_none=True)
        with self._activations():
            logits = self._model(*question.inputs)
        loss_sum, n_right, n_answers = question.marks(logits).sum(1)
        n_answers = n_answers.clamp(min=1)  # of rows of one token each, none may be asked for
        loss = loss_sum / n_answers
        loss.backward()
        self._finite(loss, n_right / n_answers)
