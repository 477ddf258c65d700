"""A training step: micro-batches compared with one batch, captured with plain steps."""

from functools import partial

import pytest
import torch
from torch import nn

from model.config import ModelConfig
from model.gpt import GPT
from training.config import AdamWConfig
from training.distributed import Processes
from training.finite_steps import FiniteSteps
from training.language.task import language_loss
from training.numerics import autocast, deterministic_algorithms
from training.optim import make_optimizer, set_learning_rate
from training.step import GraphedStep, train_step

CONTEXT = 32


def make(device="cpu", *, grad_clip=1.0, dtype="float32", **config):
    """Build a tiny GPT, the `FiniteSteps` that averages its losses, and its step."""
    device = torch.device(device)
    torch.manual_seed(0)
    shape = {"vocab_size": 61, "context_length": CONTEXT, "n_layer": 2, "n_head": 2, "n_embd": 32}
    model = GPT(ModelConfig(**shape, **config)).to(device)
    capturable = device.type == "cuda"
    optimizer = make_optimizer(model, AdamWConfig(max_steps=9, lr=1e-2), capturable=capturable)
    alone = Processes(rank=0, world_size=1, device=device)
    finite = FiniteSteps(optimizer, alone, ["loss"], grad_clip=grad_clip)
    loss_of = partial(language_loss, partial(autocast, dtype, device))
    return model, finite, partial(train_step, loss_of, model, finite)


def batches(n_steps, n_micro_batches, *, documents=False):
    """Micro-batches of two rows: tokens, targets and, optionally, document starts."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(n_steps):
        shape = n_micro_batches, 2, CONTEXT + 1
        text = torch.randint(61, shape, generator=generator)
        starts = torch.zeros(n_micro_batches, 2, CONTEXT, dtype=torch.int32)
        starts[..., 20:] = 20
        yield text[..., :-1], text[..., 1:], *([starts] if documents else [])


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("grad_clip", [0.0, 0.05])
def test_micro_batches_match_one_batch(documents, grad_clip):
    model, finite, step = make(grad_clip=grad_clip)
    other = make()[0]
    others = torch.optim.AdamW(other.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    for group in finite.optimizer.param_groups:
        group["weight_decay"] = 0.0
    losses = []
    for micro_batches in batches(3, 4, documents=documents):
        step(*micro_batches)
        tokens, targets, *starts = (part.flatten(0, 1) for part in micro_batches)
        others.zero_grad()
        loss = other(tokens, targets, doc_start=starts[0] if starts else None)
        loss.backward()
        norm = torch.cat([p.grad.flatten() for p in other.parameters()]).norm()
        if grad_clip:
            for parameter in other.parameters():
                parameter.grad *= min(1.0, grad_clip / norm)
        others.step()
        losses.append(loss.item())
    window = finite.read()
    assert window.means["loss"] == pytest.approx(sum(losses) / 3, rel=1e-5)
    assert window.grad_norm == pytest.approx(norm.item(), rel=1e-3)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("impl", "device"),
    [
        ("reference", "cpu"),
        pytest.param("reference", "cuda", marks=pytest.mark.gpu),
        pytest.param(
            "triton", "cuda", marks=pytest.mark.gpu
        ),  # rounds differently when interpreted
    ],
)
def test_cached_casts_change_no_bit(impl, device):
    """Casts written by the optimizer equal casts made in each step.

    The weights also change between two steps, as when a checkpoint is loaded.
    """
    results = []
    for keep in (False, True):
        model, finite, step = make(device, dtype="bfloat16")
        finite.optimizer._impl = impl
        take = GraphedStep(step, finite.optimizer, torch.device(device)) if keep else step
        losses = []
        with deterministic_algorithms(True):
            for number, micro_batches in enumerate(batches(9, 3)):
                if number == 6:
                    with torch.no_grad():
                        for parameter in model.parameters():
                            parameter.mul_(0.9)
                take(*(part.to(device) for part in micro_batches))
                losses.append(finite.read().means["loss"])
        results.append((losses, nn.utils.parameters_to_vector(model.parameters())))
    (plain, weights), (kept, others) = results
    assert plain == kept
    assert torch.equal(weights, others)


@pytest.mark.gpu
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_captured_step_equals_the_plain_one(dropout):
    """Bit for bit, with gradient accumulation, dropout and a changing learning rate."""
    results = []
    for capture in (False, True):
        model, finite, step = make("cuda", dropout=dropout, attention_dropout=dropout)
        take = GraphedStep(step, finite.optimizer, torch.device("cuda"), capture=capture)
        losses = []
        with deterministic_algorithms(True):
            for number, micro_batches in enumerate(batches(8, 3, documents=True)):
                set_learning_rate(finite.optimizer, 1e-2 / (1 + number))
                take(*micro_batches)
                losses.append(finite.read().means["loss"])
        results.append((losses, nn.utils.parameters_to_vector(model.parameters())))
    (plain, weights), (captured, others) = results
    assert plain == captured
    assert torch.equal(weights, others)


@pytest.mark.gpu
def test_steps_do_not_synchronize_with_the_gpu():
    _, finite, step = make("cuda")
    take = GraphedStep(step, finite.optimizer, torch.device("cuda"))
    steps = [*batches(8, 2)]
    for micro_batches in steps[:5]:
        take(*micro_batches)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for micro_batches in steps[5:]:
            take(*micro_batches)
        with pytest.raises(RuntimeError, match="synchronizing"):
            finite.read()
    finally:
        torch.cuda.set_sync_debug_mode("default")
