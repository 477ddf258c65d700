import math
from contextlib import nullcontext

import torch
from torch import nn

from training.distributed import Processes
from training.evaluate import evaluate

ALONE = Processes(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))


class Constant(nn.Module):
    """A model whose loss on every counted target is the target itself."""

    def __init__(self):
        super().__init__()
        self.seen_training = []

    def forward(self, tokens, targets, *, doc_start, reduction):
        assert reduction == "sum"
        self.seen_training.append(self.training)
        return targets[targets != -100].sum().float()


def test_weighs_tokens_not_batches():
    model = Constant()
    batches = [
        (torch.zeros(1, 3, dtype=torch.int64), torch.tensor([[1, 2, 3]]), None),
        (torch.zeros(1, 3, dtype=torch.int64), torch.tensor([[10, -100, -100]]), None),
    ]
    result = evaluate(model, batches, ALONE, nullcontext)
    assert result.tokens == 4
    assert result.loss == (1 + 2 + 3 + 10) / 4
    assert result.perplexity == math.exp(4.0)
    assert model.seen_training == [False, False] and model.training
