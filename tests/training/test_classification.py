"""Scores of whole splits, and the best weights."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

from training.classification import BEST, best_so_far, read_best, save_best, score
from training.distributed import Processes

ALONE = Processes(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))


class Lookup(nn.Module):
    """Logits are what a batch says."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, tokens, lengths, places):
        assert not self.training
        return tokens * self.weight


@pytest.mark.parametrize("batch_size", [1, 3, 7, 10])
def test_every_example_counts_once(batch_size: int) -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(7, 4), torch.randint(0, 4, (7,))
    sizes = set()

    def batch(numbers):
        sizes.add(len(numbers))
        return logits[numbers], None, None, labels[numbers]

    model = Lookup().train()
    found = score(model, batch, labels, batch_size, ALONE, nullcontext)
    assert model.training
    assert sizes == {batch_size}  # one shape: compiled once
    torch.testing.assert_close(found.logits, logits)
    assert found.accuracy == pytest.approx((logits.argmax(1) == labels).float().mean().item())
    assert found.loss == pytest.approx(nn.functional.cross_entropy(logits, labels).item())


def test_best_weights_come_back(tmp_path: Path) -> None:
    assert best_so_far(tmp_path) is None
    with pytest.raises(FileNotFoundError, match=r"has no best.safetensors: name the folder"):
        read_best(tmp_path)
    model = nn.Linear(3, 2)
    save_best(tmp_path, model, 40, 0.625)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    nn.init.zeros_(model.weight)
    assert best_so_far(tmp_path) == (40, 0.625)
    for name, weight in read_best(tmp_path).items():
        assert torch.equal(weight, before[name])
    save_best(tmp_path, model, 60, 0.75)
    assert best_so_far(tmp_path) == (60, 0.75)
    assert not read_best(tmp_path)["weight"].any()
    assert [path.name for path in tmp_path.iterdir()] == [BEST]
