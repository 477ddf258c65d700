from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

from training.distributed import Processes
from training.language.task import evaluate
from training.numerics import autocast

ALONE = Processes(rank=0, world_size=1, device=torch.device("cpu"))


class Constant(nn.Module):
    """A model whose loss on every counted target is the target itself."""

    def __init__(self):
        super().__init__()
        self.seen_training = []

    def forward(self, tokens, targets, *, doc_start, reduction):
        assert reduction == "sum"
        self.seen_training.append(self.training)
        return targets[targets != -100].sum().float()


def test_the_mean_is_over_tokens_not_batches():
    model = Constant()
    batches = [
        (torch.zeros(1, 3, dtype=torch.int64), torch.tensor([[1, 2, 3]]), None),
        (torch.zeros(1, 3, dtype=torch.int64), torch.tensor([[10, -100, -100]]), None),
    ]
    assert evaluate(model, batches, ALONE, nullcontext) == ((1 + 2 + 3 + 10) / 4, 4)
    assert model.seen_training == [False, False] and model.training


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_of_the_model_is_restored(training):
    model = Constant().train(training)
    batch = torch.zeros(1, 3, dtype=torch.int64), torch.tensor([[1, 2, 3]]), None
    evaluate(model, [batch], ALONE, nullcontext)
    assert model.seen_training == [False] and model.training is training


class Spy(nn.Module):
    """Model that records its document starts and the gradient and autocast state of each call."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def forward(self, tokens, targets, *, doc_start, reduction):
        cast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")
        self.calls.append((doc_start, torch.is_grad_enabled(), cast))
        return targets.sum().float()


def test_documents_and_autocast_reach_the_model_and_gradients_do_not():
    model, tokens = Spy(), torch.zeros(1, 3, dtype=torch.int64)
    doc_start = torch.tensor([[0, 1, 1]], dtype=torch.int32)
    batches = [(tokens, tokens, doc_start), (tokens, tokens, None)]
    evaluate(model, batches, ALONE, partial(autocast, "bfloat16", torch.device("cpu")))
    (masked, *first), (packed, *second) = model.calls
    assert torch.equal(masked, doc_start) and packed is None
    assert first == second == [False, torch.bfloat16]


def test_losses_are_summed_in_double_precision():
    tokens = torch.zeros(1, 2, dtype=torch.int64)
    batches = [(tokens, torch.tensor([targets]), None) for targets in ([2**24, 0], [1, 0], [1, 0])]
    loss, _ = evaluate(Constant(), batches, ALONE, nullcontext)
    assert loss == (2**24 + 2) / 6  # in single precision, 2^24 + 1 rounds to 2^24
