"""Optimizer of a model: parameter groups and the learning rate schedule."""

import math
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from training.adamw import AdamW
from training.config import AdamWConfig
from training.muon import Muon

_SCHEDULE = ("max_steps", "lr", "min_lr", "schedule", "decay_share", "warmup_steps")
"""Settings that `learning_rate` reads."""


def learning_rate(step: int, config: AdamWConfig) -> float:
    """Learning rate of step `step`, counted from 0.

    It rises to lr over warmup_steps and then falls to min_lr at max_steps. The linear schedule is
    that of the FlashAttention paper's GPT-2 runs (arXiv 2205.14135, appendix E.2), and wsd that of
    MiniCPM (arXiv 2404.06395) with a linear decay.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    first = config.warmup_steps  # step at which the decay begins
    if config.schedule == "wsd":
        first = max(first, config.max_steps - round(config.decay_share * config.max_steps))
    done = min(max(step - first, 0) / max(config.max_steps - first, 1), 1.0)
    left = 0.5 * (1.0 + math.cos(math.pi * done)) if config.schedule == "cosine" else 1.0 - done
    return config.min_lr + left * (config.lr - config.min_lr)


def changed_settings(step: int, before: AdamWConfig, now: AdamWConfig) -> list[str]:
    """Log lines about settings of the optimizer that changed at step `step`.

    `before` and `now` are of one class. Batches are not the optimizer's.
    """
    changed = {
        field.name: f"optim.{field.name} changed from {old} to {new}"
        for field in fields(now)
        if "batch" not in field.name
        and (old := getattr(before, field.name)) != (new := getattr(now, field.name))
    }
    schedule = [changed.pop(name) for name in _SCHEDULE if name in changed]
    lines = [", ".join(changed.values())] if changed else []
    old_lr, new_lr = learning_rate(step, before), learning_rate(step, now)
    if schedule and not (old_lr == new_lr and before.schedule == now.schedule == "constant"):
        instead = "" if old_lr == new_lr else f" instead of {old_lr:.3g}"
        line = f"{', '.join(schedule)}: the learning rate continues at {new_lr:.3g}{instead}"
        lines.append(line)
    return lines


def make_optimizer(model: nn.Module, config: AdamWConfig, *, capturable: bool = False) -> AdamW:
    """Optimizer of `model`: AdamW with weight decay on matrices and embeddings, not on vectors.

    With optim.name=muon or normuon, that updates the matrices of the blocks, with the same weight
    decay. If `capturable`, the learning rate and the step counts stay on the GPU, so that a step
    can be captured in a CUDA graph.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    parameters = [p for _, p in named]
    hidden = []
    if config.name != "adamw":
        hidden = [p for name, p in named if ".blocks." in f".{name}" and p.dim() == 2]
    scale = 1.0 if config.adamw_lr is None else config.adamw_lr / config.lr
    muon_ids = set(map(id, hidden))
    decayed = [p for p in parameters if p.dim() >= 2 and id(p) not in muon_ids]
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": config.weight_decay, "lr_scale": scale},
        {
            "params": [p for p in parameters if p.dim() < 2],
            "weight_decay": 0.0,
            "lr_scale": scale,
        },
    ]
    if hidden:
        muon = {
            "lr_scale": 1.0,
            "momentum": config.momentum,
            "normalize_rows": config.name == "normuon",
        }
        groups.append({"params": hidden, "weight_decay": config.weight_decay, **muon})
    for group in groups:
        lr = config.lr * group["lr_scale"]
        group["lr"] = torch.tensor(lr, device=parameters[0].device) if capturable else lr
    make = AdamW if config.name == "adamw" else Muon
    return make(
        groups,
        betas=config.betas,
        eps=config.eps,
        capturable=capturable,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of all parameter groups, times the lr_scale of each."""
    for group in optimizer.param_groups:
        scaled = lr * group.get("lr_scale", 1.0)
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(scaled)  # a captured step reads this tensor
        else:
            group["lr"] = scaled
