import pytest
import torch
from torch import nn

from training.language.config import OptimConfig
from training.optim import learning_rate, make_optimizer, set_learning_rate


def config(**values):
    return OptimConfig(**{"max_steps": 100, "batch_tokens": 64, "micro_batch_size": 1, **values})


def test_warmup_rises_to_lr_and_never_is_zero():
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
            "warmup_steps=100 must be .* optim.max_steps=100: set optim.warmup_steps=10",
        ),
        ({"min_lr": 1.0}, "optim.min_lr=1.0 must be .*: set optim.min_lr=0, or raise optim.lr"),
        ({"schedule": "constant", "min_lr": 1e-5}, "no effect with optim.schedule=constant"),
        ({"grad_clip": -1.0}, "optim.grad_clip must be .* at least 0, got -1.0"),
    ],
)
def test_errors(values, message):
    with pytest.raises(ValueError, match=message):
        config(**values)


def test_only_matrices_decay():
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    optimizer = make_optimizer(model, config(lr=0.5, weight_decay=0.2, betas=(0.8, 0.9)))
    set_learning_rate(optimizer, 0.1)
    for parameter in model.parameters():
        parameter.data.fill_(1.0)
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    # with no gradient all that moves a weight is the decay: 1 - lr * weight_decay
    torch.testing.assert_close(model[0].weight, torch.full((2, 3), 1 - 0.1 * 0.2))
    assert torch.all(model[0].bias == 1) and torch.all(model[1].weight == 1)
