"""One training step of a classifier, compared with plain PyTorch."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from tests.training_runs import call_on_two_processes
from training.classification.objectives import (
    label_targets,
    masked_token_targets,
    next_token_targets,
    target_loss,
)
from training.distributed import Processes, start_processes
from training.finite_steps import FiniteSteps
from training.step import train_step


def finite_steps(model, grad_clip=0.0):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=True)
    alone = Processes(rank=0, world_size=1, device=torch.device("cpu"))
    return FiniteSteps(optimizer, alone, ["loss", "accuracy"], grad_clip=grad_clip)


def make_step(model, finite, targets_of=label_targets):
    """Training step on one batch, whose parts may be None."""

    def step(batch):
        def loss_of(model, _):
            return target_loss(targets_of, nullcontext, finite.processes, model, batch)

        train_step(loss_of, model, finite, torch.zeros(1))

    return step


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 4)

    def forward(self, tokens, lengths, positions):
        return self.layer(tokens)


@pytest.mark.parametrize("grad_clip", [0.0, 0.05])
def test_steps_match_plain_pytorch(grad_clip: float) -> None:
    model, other = Linear(), Linear()
    others = torch.optim.SGD(other.parameters(), lr=0.5)
    finite = finite_steps(model, grad_clip)
    step = make_step(model, finite)
    losses, right = [], []
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randn(6, 3, generator=generator)
        labels = torch.randint(0, 4, (6,), generator=generator)
        step((tokens, None, None, labels))
        others.zero_grad()
        logits = other(tokens, None, None)
        loss = F.cross_entropy(logits, labels)
        loss.backward()
        norm = torch.cat([p.grad.flatten() for p in other.parameters()]).norm()
        if grad_clip:
            for parameter in other.parameters():
                parameter.grad *= min(1.0, grad_clip / norm)
        others.step()
        losses.append(loss.item())
        right.append((logits.argmax(1) == labels).float().mean().item())
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)
    window = finite.read()
    assert window.means == pytest.approx({"loss": sum(losses) / 3, "accuracy": sum(right) / 3})
    assert window.grad_norm == pytest.approx(norm.item())


class Bigrams(nn.Module):
    """Logits looked up from the token at each position, in a second table where it is hidden."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(2, 5, 5))

    def forward(self, tokens, lengths, positions, hidden=None):
        rows = tokens if hidden is None else torch.where(hidden, 0, tokens)
        return self.table[0 if hidden is None else hidden.long(), rows]


@pytest.mark.parametrize(
    "targets_of", [next_token_targets, partial(masked_token_targets, share=0.4)]
)
def test_the_loss_of_a_step_is_the_mean_over_its_targets(targets_of) -> None:
    """The mean is over all target tokens of the batch, whatever the lengths of its rows."""
    model, other = Bigrams(), Bigrams()
    finite = finite_steps(model)
    step = make_step(model, finite, targets_of)
    tokens = torch.randint(0, 5, (3, 8))
    lengths = torch.tensor([1, 4, 8], dtype=torch.int32)
    batch = tokens, lengths, None, torch.zeros(3, dtype=torch.int64)
    torch.manual_seed(5)
    step(batch)
    torch.manual_seed(5)
    inputs, answers, counted = targets_of(batch, None)
    assert 0 < counted.sum() < lengths.sum()
    logits = other(*inputs)
    loss = F.cross_entropy(logits[counted], answers[counted])
    loss.backward()
    right = (logits.argmax(-1) == answers)[counted].float().mean()
    expected = {"loss": loss.item(), "accuracy": right.item()}
    assert finite.read().means == pytest.approx(expected)
    torch.testing.assert_close(model.table, other.table - 0.5 * other.table.grad)


def test_a_batch_without_targets_changes_nothing() -> None:
    model, before = Bigrams(), Bigrams().table
    finite = finite_steps(model)
    step = make_step(model, finite, next_token_targets)
    step((torch.zeros(3, 8).long(), torch.ones(3, dtype=torch.int32), None, torch.zeros(3)))
    assert finite.read().means == {"loss": 0, "accuracy": 0}
    assert torch.equal(model.table, before)


TARGETS = {
    "causal": next_token_targets,
    "masked": partial(masked_token_targets, share=0.4),
    "labels": label_targets,
}
EXAMPLES = torch.arange(8)


def train_on(processes, objective: str, n_steps: int = 2):
    """Train on this process's share of eight rows of different lengths; return weights, window."""
    model = Linear() if objective == "labels" else Bigrams()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=True)
    finite = FiniteSteps(optimizer, processes, ["loss", "accuracy"], grad_clip=1.0)

    def targets_of(batch, _):  # the tokens hidden in a row depend on the row alone
        return TARGETS[objective](batch, EXAMPLES[mine])

    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([1, 2, 2, 3, 8, 7, 8, 8], dtype=torch.int32)
    n_rows = 8 // processes.world_size  # the first of two processes has the short rows
    mine = slice(processes.rank * n_rows, (processes.rank + 1) * n_rows)
    parallel = model if processes.world_size == 1 else DistributedDataParallel(model)
    step = make_step(parallel, finite, targets_of)
    for _ in range(n_steps):
        if objective == "labels":
            tokens = torch.randn(8, 3, generator=generator)
        else:
            tokens = torch.randint(0, 5, (8, 8), generator=generator)
        labels = torch.randint(0, 4, (8,), generator=generator)
        step((tokens[mine], lengths[mine], None, labels[mine]))
    window = finite.read()
    return torch.cat([p.detach().flatten() for p in model.parameters()]), window


def compare_with_one_process(folder) -> None:
    with start_processes("cpu") as processes:
        for objective in TARGETS:
            weights, window = train_on(processes, objective)
            expected, alone = torch.load(folder / f"{objective}.pt", weights_only=False)
            torch.testing.assert_close(weights, expected)
            assert window.means == pytest.approx(alone.means, rel=1e-5)
            assert window.grad_norm == pytest.approx(alone.grad_norm, rel=1e-5)


@pytest.mark.distributed
def test_two_processes_with_unequal_targets_match_one(tmp_path) -> None:
    alone = Processes(rank=0, world_size=1, device=torch.device("cpu"))
    for objective in TARGETS:
        torch.save(train_on(alone, objective), tmp_path / f"{objective}.pt")
    ends = call_on_two_processes(tmp_path, compare_with_one_process, tmp_path)
    assert [status for status, _ in ends] == [0, 0], ends
