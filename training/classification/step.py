"""One step of a classifier's training, from a batch to new weights."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from training.classification.objectives import Ask, LabelledBatch, ask_labels


class ClassifierStep:
    """Gradients, clipping and the optimizer, with nothing in between that waits for the GPU.

    The model is called with what `ask` gives it, and gives logits. `activations` makes the context
    of the forward pass. A grad_clip of 0 turns clipping off.

    Attributes:
        loss_sum, accuracy_sum: () of the batches since `forget`, each a mean of a batch's answers.
        grad_norm: (), of the last step, before clipping.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        activations: Callable[[], AbstractContextManager],
        device: torch.device,
        *,
        grad_clip: float,
        ask: Ask = ask_labels,
    ) -> None:
        self._model, self._optimizer, self._activations = model, optimizer, activations
        self._ask = ask
        self._parameters = list(model.parameters())
        self._grad_clip = grad_clip or math.inf
        # What a CUDA graph writes to must be there before, and stay.
        self.loss_sum, self.accuracy_sum, self.grad_norm = (
            torch.zeros((), device=device) for _ in range(3)
        )

    def __call__(self, batch: LabelledBatch) -> None:
        """Take the step; of several processes each takes the mean of its own answers."""
        question = self._ask(batch, None)
        self._optimizer.zero_grad(set_to_none=True)
        with self._activations():
            logits = self._model(*question.inputs)
        loss_sum, n_right, n_answers = question.marks(logits).sum(1)
        n_answers = n_answers.clamp(min=1)  # of rows of one token each, none may be asked for
        loss = loss_sum / n_answers
        loss.backward()
        self.grad_norm.copy_(nn.utils.clip_grad_norm_(self._parameters, self._grad_clip))
        self._optimizer.step()
        self.loss_sum += loss.detach()
        self.accuracy_sum += n_right.detach() / n_answers.detach()

    def means(self, n_steps: int) -> Tensor:
        """(2,) mean loss and accuracy of the last `n_steps` steps, all those since `forget`."""
        return torch.stack((self.loss_sum, self.accuracy_sum)) / n_steps

    def forget(self) -> None:
        """Begin to add up anew."""
        self.loss_sum.zero_()
        self.accuracy_sum.zero_()
