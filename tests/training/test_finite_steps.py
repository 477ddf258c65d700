"""A step that is not finite changes nothing on any process, and its number is recorded."""

import math
import random

import pytest
import torch
from torch import nn

from tests.training_runs import call_on_two_processes
from training.config import AdamWConfig
from training.distributed import Processes, start_processes
from training.finite_steps import HIGH, FiniteSteps, LossSpikeDetector, Window
from training.optim import make_optimizer
from training.step import GraphedStep

ALONE = Processes(rank=0, world_size=1, device=torch.device("cpu"))
NAN, INF = math.nan, math.inf


def make(device="cpu", *, capturable=False):
    torch.manual_seed(0)
    model = nn.Linear(3, 2).to(device)
    optimizer = make_optimizer(model, AdamWConfig(max_steps=9), capturable=capturable)
    return model, optimizer


def gradients(model, fill=1.0):
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, fill)


@pytest.mark.parametrize(
    ("gradient", "values"),
    [(NAN, (1.0, 0.5)), (INF, (1.0, 0.5)), (1.0, (NAN, 0.5)), (1.0, (1.0, -INF))],
)
def test_a_step_that_is_not_finite_changes_nothing(gradient, values):
    model, optimizer = make()
    other, others = make()
    finite = FiniteSteps(optimizer, ALONE, ["loss", "accuracy"])
    for step in range(5):
        if step in (0, 3):  # before the optimizer has any state, and after
            gradients(model, gradient)
            finite(*map(torch.tensor, values))
        else:
            for m in (model, other):
                gradients(m, step)
            finite(torch.tensor(float(step)), torch.tensor(1.0))
            others.step()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        for name, value in others.state[b].items():
            assert torch.equal(optimizer.state[a][name], value)
    means = {"loss": pytest.approx(7 / 3), "accuracy": 1.0}
    assert finite.read() == Window(
        means=means, grad_norm=pytest.approx(4 * 8**0.5), n_skipped=2, skipped=[0, 3], in_a_row=0
    )


def test_consecutive_skips_are_counted_across_reads():
    model, optimizer = make()
    finite = FiniteSteps(optimizer, ALONE, ["loss"])
    gradients(model)
    read = []
    for loss in (1.0, NAN, NAN, NAN, 2.0, NAN):
        finite(torch.tensor(loss))
        window = finite.read()
        read.append((window.means["loss"], window.skipped, window.in_a_row))
    assert read == [
        (1.0, [], 0), (None, [1], 1), (None, [2], 2), (None, [3], 3), (2.0, [], 0), (None, [5], 1),
    ]  # fmt: skip


def test_only_the_first_of_many_skipped_steps_are_listed():
    model, optimizer = make()
    finite = FiniteSteps(optimizer, ALONE, ["loss"])
    gradients(model, NAN)
    for _ in range(20):
        finite(torch.tensor(1.0))
    window = finite.read()
    assert (window.n_skipped, window.in_a_row, window.grad_norm) == (20, 20, None)
    assert window.skipped == [*range(16)]


@pytest.mark.parametrize("fill", [0.01, 5.0])
def test_gradient_clipping_matches_pytorch(fill):
    model, optimizer = make()
    other, others = make()
    finite = FiniteSteps(optimizer, ALONE, ["loss"], grad_clip=0.5)
    for scale in (1.0, 0.3, 2.0):  # several, as Adam's first step does not depend on the scale
        for m in (model, other):
            gradients(m, fill * scale)
        finite(torch.tensor(1.0))
        norm = nn.utils.clip_grad_norm_(other.parameters(), 0.5)
        others.step()
        assert finite.read().grad_norm == pytest.approx(norm.item())
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def skip_on_both_processes():
    with start_processes("cpu") as processes:
        model, optimizer = make()
        before = [p.clone() for p in model.parameters()]
        finite = FiniteSteps(optimizer, processes, ["loss"])
        gradients(model)
        finite(torch.tensor(NAN if processes.rank else 1.0))
        assert all(map(torch.equal, before, model.parameters()))
        finite(torch.tensor(2.0 + processes.rank))
        window = finite.read()
        assert (window.means, window.skipped) == ({"loss": 2.5}, [0])


@pytest.mark.distributed
def test_all_processes_skip_a_step_that_one_must_skip(tmp_path):
    assert [status for status, _ in call_on_two_processes(tmp_path, skip_on_both_processes)] == [
        0,
        0,
    ]


@pytest.mark.gpu
def test_captured_steps_are_skipped():
    device = torch.device("cuda")
    model, optimizer = make(device, capturable=True)
    alone = Processes(rank=0, world_size=1, device=device)
    finite = FiniteSteps(optimizer, alone, ["loss"], grad_clip=1.0)

    def learn(x):
        optimizer.zero_grad(set_to_none=True)
        loss = model(x).square().mean()
        loss.backward()
        finite(loss)

    step = GraphedStep(learn, optimizer, device)
    bad = (1, 5, 6)
    for number in range(8):
        before = [p.detach().clone() for p in model.parameters()]
        step(torch.full((4, 3), NAN if number in bad else 1.0))
        same = [torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
        assert all(same) == (number in bad)
    window = finite.read()
    assert (window.skipped, window.in_a_row) == ([1, 5, 6], 0)


def falling_losses(seed, n=400):
    generator = random.Random(seed)
    return [2 + 9 / (1 + 0.05 * step) + generator.gauss(0, 0.03) for step in range(n)]


@pytest.mark.parametrize("seed", range(10))
def test_only_a_spike_is_detected(seed):
    losses = falling_losses(seed)
    losses[300] += 0.6
    spikes = LossSpikeDetector()
    scores = [spikes.z_score(loss) for loss in losses]
    assert scores[:20] == [None] * 20
    assert [i for i, z in enumerate(scores) if z is not None and z >= HIGH] == [300]


def test_scores_are_in_standard_deviations():
    spikes = LossSpikeDetector([-1.0, 1.0] * 25)
    assert spikes.z_score(14.826) == pytest.approx(10)


def test_losses_that_are_all_the_same_have_no_score():
    assert LossSpikeDetector([1.0] * 50).z_score(2.0) is None
