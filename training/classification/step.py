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
        """Take the step on the mean over the answers of all processes.

        Processes may have different numbers of answers, so each divides by their mean number.
        """
        question = self._ask(batch, None)
        processes = self._finite.processes
        self._finite.optimizer.zero_grad(set_to_none=True)
        with self._activations():
            logits = self._model(*question.inputs)
        loss_sum, n_right, n_answers = question.marks(logits).sum(1)
        n_answers = processes.sum(n_answers.detach().clone()) / processes.world_size
        # Rows of one token each have no answers at all. One answer of several processes is still
        # less than one for each of them.
        n_answers = n_answers.clamp(min=1 / processes.world_size)
        # Gradients and means of the loss are averaged over processes afterwards.
        loss = loss_sum / n_answers
        loss.backward()
        self._finite(loss, n_right / n_answers)
