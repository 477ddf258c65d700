"""Scores of whole splits, and the best weights."""

import os
import pickle
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from model.classifier_config import ClassifierConfig
from model.token_predictor import TokenPredictor
from training.classification.objectives import masked_token_targets, next_token_targets
from training.classification.scoring import BEST, best_so_far, read_best, save_best, score
from training.distributed import Processes

ALONE = Processes(rank=0, world_size=1, device=torch.device("cpu"))


class Lookup(nn.Module):
    """Model that returns its input as the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, tokens, lengths, positions):
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
    scores = score(model, batch, len(labels), batch_size, ALONE, nullcontext)
    assert model.training
    assert sizes == {batch_size}  # one shape: compiled once
    assert scores.logits is not None and scores.n_examples == 7
    torch.testing.assert_close(scores.logits, logits)
    assert scores.accuracy == pytest.approx((logits.argmax(1) == labels).float().mean().item())
    assert scores.loss == pytest.approx(nn.functional.cross_entropy(logits, labels).item())


@pytest.mark.parametrize("documents", [1, 2])
@pytest.mark.parametrize(
    "targets_of", [next_token_targets, partial(masked_token_targets, share=0.5)]
)
def test_every_target_token_counts_once(targets_of, documents: int) -> None:
    """Any batch size gives the scores of all rows in one batch."""
    n, length = 7, 12
    rows = torch.randint(0, 5, (n, documents, length))
    lengths = torch.randint(1, length + 1, (n, documents), dtype=torch.int32)
    config = ClassifierConfig(
        vocab_size=5, n_classes=2, context_length=length, n_embd=8, n_inner=8, documents=documents
    )
    model = TokenPredictor(config, causal=targets_of is next_token_targets)
    nn.init.normal_(model.tokens_out.weight)  # otherwise all tokens are nearly equally likely

    def batch(numbers):
        return rows[numbers].flatten(0, 1), lengths[numbers].flatten(), None, numbers

    numbers = torch.arange(n)
    inputs, answers, counted = targets_of(batch(numbers), numbers)
    with torch.no_grad():
        logits = model(*inputs)[counted]
    loss = nn.functional.cross_entropy(logits, answers[counted]).item()
    accuracy = (logits.argmax(1) == answers[counted]).float().mean().item()
    for batch_size in (1, 3, 7, 10):
        torch.manual_seed(batch_size)  # nothing is drawn
        scores = score(model, batch, n, batch_size, ALONE, nullcontext, targets_of)
        assert (scores.n_examples, scores.logits) == (n, None)
        assert scores.loss == pytest.approx(loss, rel=1e-5)
        assert scores.accuracy == pytest.approx(accuracy)


def test_best_weights_round_trip(tmp_path: Path) -> None:
    assert best_so_far(tmp_path) is None
    with pytest.raises(FileNotFoundError, match=r"has no best.safetensors. Give the folder"):
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


@pytest.mark.parametrize("damage", ["flipped", "cut", "pickle", "other step", "empty", "pipe"])
def test_damaged_best_weights_are_reported(tmp_path: Path, damage: str) -> None:
    save_best(tmp_path, torch.nn.Linear(3, 2), 40, 0.625)
    path = tmp_path / BEST
    content = bytearray(path.read_bytes())
    if damage == "flipped":
        content[-5] ^= 1
    elif damage == "other step":
        content = content.replace(b'"step":"40"', b'"step":"41"')
    elif damage == "pickle":
        content = bytearray(pickle.dumps({"a": 1}))
    path.write_bytes(content[: 50 if damage == "cut" else 0 if damage == "empty" else None])
    if damage == "pipe":
        path.unlink()
        os.mkfifo(path)
    for read in (read_best, best_so_far):
        with pytest.raises(ValueError, match=r"best.safetensors is (damaged \(|not a regular)"):
            read(tmp_path)


def test_best_weights_of_older_runs_have_no_checksum(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / BEST, {"step": "4", "val_accuracy": "0.5"})
    assert best_so_far(tmp_path) == (4, 0.5)
