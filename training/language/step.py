"""One step of a GPT's training, from its micro-batches to new weights."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from training.distributed import average
from training.finite_steps import FiniteSteps


class LanguageStep:
    """Gradients and the optimizer, with nothing in between that waits for the GPU.

    The model is called as model(tokens, targets, doc_start=doc_start), and gives the mean loss.
    `activations` makes the context of the forward pass. `finite` takes the step, and is given the
    mean loss.
    """

    def __init__(
        self,
        model: nn.Module,
        finite: FiniteSteps,
        activations: Callable[[], AbstractContextManager],
    ) -> None:
        self._model, self._finite, self._activations = model, finite, activations
        self._whole = []  # weights whose gradients FSDP leaves alone
        if isinstance(model, FSDPModule):
            self._whole = [p for p in model.parameters() if not isinstance(p, DTensor)]

    def __call__(self, tokens: Tensor, targets: Tensor, doc_start: Tensor | None = None) -> None:
        """Take the step on (M, B, T) tensors, M micro-batches of this process.

        Their gradients add up, and are exchanged between processes with the last.
        """
        self._finite.optimizer.zero_grad(set_to_none=True)
        n_micro_batches = len(tokens)
        total = torch.zeros((), device=tokens.device)
        for number in range(n_micro_batches):
            if isinstance(self._model, DistributedDataParallel):
                self._model.require_backward_grad_sync = number == n_micro_batches - 1
            documents = None if doc_start is None else doc_start[number]
            with self._activations():
                loss = self._model(tokens[number], targets[number], doc_start=documents)
            (loss / n_micro_batches).backward()
            total += loss.detach() / n_micro_batches
        if self._whole:
            average([p.grad for p in self._whole if p.grad is not None])
        self._finite(total)
