"""The optimizer, its parameter groups and the learning rate schedule."""

import math
from typing import Any

import torch
from torch import nn

from training.adamw import AdamW
from training.config import AdamWConfig
from training.muon import Muon


def learning_rate(step: int, config: AdamWConfig) -> float:
    """The learning rate of step `step`, counted from 0.

    It rises to lr over warmup_steps and then falls to min_lr at max_steps (linear: the schedule of
    the FlashAttention paper's GPT-2 runs, arXiv 2205.14135, appendix E.2).
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    done = (step - config.warmup_steps) / (config.max_steps - config.warmup_steps)
    done = min(done, 1.0)
    left = 1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.min_lr + left * (config.lr - config.min_lr)


def schedule_change(step: int, before: AdamWConfig, now: AdamWConfig) -> str | None:
    """What changes with step `step` as the settings are no longer those of `before`, if it does."""
    names = ("max_steps", "lr", "min_lr", "schedule", "warmup_steps")
    values = [(name, getattr(before, name), getattr(now, name)) for name in names]
    changes = [
        f"optim.{name} was {was} and is {now_is}" for name, was, now_is in values if was != now_is
    ]
    was, is_now = learning_rate(step, before), learning_rate(step, now)
    if not changes or (was == is_now and before.schedule == now.schedule == "constant"):
        return None
    return (
        f"the schedule changes, as {', '.join(changes)}: the learning rate goes on with "
        f"{is_now:.3g}, where it was to be {was:.3g}"
    )


def make_optimizer(model: nn.Module, config: AdamWConfig, *, capturable: bool = False) -> AdamW:
    """AdamW over the parameters of `model`: matrices and embeddings decay, vectors do not.

    With optim.name=muon the matrices of its blocks are Muon's, and decay, too.

    If `capturable`, the learning rate and the number of steps stay on the GPU, so that a step can
    be captured in a CUDA graph.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    parameters = [p for _, p in named]
    hidden = []
    if config.name == "muon":
        hidden = [p for name, p in named if ".blocks." in f".{name}" and p.dim() == 2]
    taken = set(map(id, hidden))
    decayed = [p for p in parameters if p.dim() >= 2 and id(p) not in taken]
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    if hidden:
        groups.append(
            {"params": hidden, "weight_decay": config.weight_decay, "momentum": config.momentum}
        )
    make = Muon if config.name == "muon" else AdamW
    return make(
        groups,
        lr=torch.tensor(config.lr, device=parameters[0].device) if capturable else config.lr,
        betas=config.betas,
        eps=config.eps,
        capturable=capturable,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Use `lr` from the next step on."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)  # a captured step reads this tensor
        else:
            group["lr"] = lr
