import pytest
import torch
from torch import nn

from training.language.config import OptimConfig
from training.optim import changed_settings, learning_rate, make_optimizer, set_learning_rate


def config(**values):
    return OptimConfig(**{"max_steps": 100, "batch_tokens": 64, "micro_batch_size": 1, **values})


def test_warmup_rises_to_lr_and_is_never_zero():
    c = config(lr=1.0, warmup_steps=10)
    assert [learning_rate(s, c) for s in (0, 4, 9)] == [0.1, 0.5, 1.0]
    assert learning_rate(10, c) == 1.0


@pytest.mark.parametrize(
    ("schedule", "middle"), [("linear", 0.55), ("cosine", 0.55), ("constant", 1.0)]
)
def test_decay(schedule, middle):
    min_lr = 0.0 if schedule == "constant" else 0.1
    c = config(lr=1.0, min_lr=min_lr, warmup_steps=0, schedule=schedule)
    assert learning_rate(0, c) == 1.0
    assert learning_rate(50, c) == pytest.approx(middle)
    end = 1.0 if schedule == "constant" else 0.1
    assert learning_rate(100, c) == pytest.approx(end)
    assert learning_rate(500, c) == pytest.approx(end)


@pytest.mark.parametrize(
    ("warmup", "share", "first"), [(0, 0.2, 80), (10, 0.5, 50), (60, 0.5, 60), (0, 1.0, 0)]
)
def test_wsd_stays_at_lr_and_then_decays(warmup, share, first):
    c = config(
        lr=1.0, min_lr=0.25, schedule="wsd", decay_share=share, warmup_steps=warmup, max_steps=100
    )
    for step in range(warmup, 101):
        left = 1.0 if step <= first else (100 - step) / (100 - first)
        assert learning_rate(step, c) == pytest.approx(0.25 + 0.75 * left)
    assert learning_rate(200, c) == 0.25


def test_wsd_continues_at_the_same_rate_if_it_is_extended():
    short, long = (config(lr=0.5, schedule="wsd", max_steps=n) for n in (100, 200))
    assert [learning_rate(step, short) for step in range(81)] == [0.5] * 81
    assert changed_settings(80, short, long) == [
        "optim.max_steps changed from 100 to 200: the learning rate continues at 0.5"
    ]
    (line,) = changed_settings(90, short, long)
    assert line.endswith("continues at 0.5 instead of 0.25")


def test_all_changed_settings_are_reported():
    before = config(weight_decay=0.5)
    assert changed_settings(50, before, config(grad_clip=2.0)) == [
        "optim.weight_decay changed from 0.5 to 0.1, optim.grad_clip changed from 1.0 to 2.0"
    ]
    assert changed_settings(50, before, config(lr=1.0)) == [
        "optim.weight_decay changed from 0.5 to 0.1",
        "optim.lr changed from 0.0006 to 1.0: the learning rate continues at 0.5 instead of 0.0003",
    ]
    assert changed_settings(50, before, config(weight_decay=0.5, eps=0.1, batch_tokens=128)) == [
        "optim.eps changed from 1e-08 to 0.1"
    ]
    assert changed_settings(50, before, before) == []


def test_cosine_is_above_linear_early_and_below_late():
    linear, cosine = (config(lr=1.0, schedule=s) for s in ("linear", "cosine"))
    assert learning_rate(20, cosine) > learning_rate(20, linear)
    assert learning_rate(80, cosine) < learning_rate(80, linear)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_steps": 0}, "optim.max_steps=0 must be at least 1"),
        (
            {"warmup_steps": 100},
            "warmup_steps=100 must be .* optim.max_steps=100. Try optim.warmup_steps=10",
        ),
        ({"min_lr": 1.0}, "optim.min_lr=1.0 must be .*. Try optim.min_lr=0, or raise optim.lr"),
        ({"schedule": "constant", "min_lr": 1e-5}, "no effect with optim.schedule=constant"),
        ({"schedule": "wsd", "decay_share": 0.0}, "optim.decay_share=0.0 must be above 0"),
        ({"schedule": "wsd", "decay_share": 1.5}, "optim.decay_share=1.5 must be .* at most 1"),
        (
            {"schedule": "wsd", "decay_share": 0.001},
            "optim.decay_share=0.001 of optim.max_steps=100 must be at least one step",
        ),
        (
            {"adamw_lr": 1e-3},
            "optim.adamw_lr=0.001 has no effect with optim.name=adamw. Set optim.adamw_lr=null, or",
        ),
        ({"name": "muon", "adamw_lr": 0.0}, "optim.adamw_lr=0.0 must be a finite number above 0"),
        ({"name": "lion"}, "optim.name='lion' must be one of adamw, muon, normuon"),
        ({"decay_share": 0.5}, "optim.decay_share=0.5 has no effect with optim.schedule=linear"),
        ({"grad_clip": -1.0}, "optim.grad_clip=-1.0 must be .* at least 0"),
    ],
)
def test_errors(values, message):
    with pytest.raises(ValueError, match=message):
        config(**values)


def test_adamw_may_have_its_own_learning_rate_with_muon():
    model = nn.ModuleDict({"blocks": nn.Linear(3, 2), "head": nn.Linear(3, 2, bias=False)})
    for capturable in (False, True):
        settings = config(name="muon", lr=0.4, adamw_lr=0.1)
        optimizer = make_optimizer(model, settings, capturable=capturable)
        for lr, scaled in ((0.4, 0.1), (0.2, 0.05)):
            set_learning_rate(optimizer, lr)
            rates = {id(p): float(g["lr"]) for g in optimizer.param_groups for p in g["params"]}
            assert rates == pytest.approx(
                {
                    id(model["blocks"].weight): lr,
                    id(model["blocks"].bias): scaled,
                    id(model["head"].weight): scaled,
                }
            )


def test_only_matrices_decay():
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    optimizer = make_optimizer(model, config(lr=0.5, weight_decay=0.2, betas=(0.8, 0.9)))
    set_learning_rate(optimizer, 0.1)
    for parameter in model.parameters():
        parameter.data.fill_(1.0)
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    # without a gradient, only weight decay changes a weight: 1 - lr * weight_decay
    torch.testing.assert_close(model[0].weight, torch.full((2, 3), 1 - 0.1 * 0.2))
    assert torch.all(model[0].bias == 1) and torch.all(model[1].weight == 1)
