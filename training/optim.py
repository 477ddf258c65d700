"""AdamW, its parameter groups and the learning rate schedule."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn


@dataclass(frozen=True, kw_only=True)
class AdamWConfig:
    """The optimizer and its schedule."""

    max_steps: int
    """Optimizer steps of the whole run."""
    lr: float = 6e-4
    """Peak learning rate."""
    min_lr: float = 0.0
    """Learning rate at the last step."""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """Shape of the decay from lr to min_lr after the warm-up."""
    warmup_steps: int = 0
    """Steps in which the learning rate rises linearly from 0 to lr."""
    weight_decay: float = 0.1
    """Decay of matrices and embeddings; biases and normalisation are never decayed."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    grad_clip: float = 1.0
    """Largest norm of the gradient; 0 turns clipping off."""

    def __post_init__(self) -> None:
        _check_positive(self, "max_steps")
        if not 0 < self.lr < math.inf:
            raise ValueError(f"optim.lr must be a finite number above 0, got {self.lr}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optim.betas must be two numbers in [0, 1), got {self.betas}")
        if not 0 < self.eps < math.inf:
            raise ValueError(f"optim.eps must be a finite number above 0, got {self.eps}")
        if not 0 <= self.warmup_steps < self.max_steps:
            raise ValueError(
                f"optim.warmup_steps must lie in [0, optim.max_steps={self.max_steps}), "
                f"got {self.warmup_steps}"
            )
        if not 0 <= self.min_lr <= self.lr:
            raise ValueError(f"optim.min_lr must lie in [0, optim.lr={self.lr}], got {self.min_lr}")
        if self.schedule == "constant" and self.min_lr != 0:
            raise ValueError(
                f"optim.min_lr={self.min_lr} has no effect with optim.schedule=constant: "
                "leave it out"
            )
        for name in ("weight_decay", "grad_clip"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(
                    f"optim.{name} must be a finite number of at least 0, got {getattr(self, name)}"
                )


@dataclass(frozen=True, kw_only=True)
class OptimConfig(AdamWConfig):
    """How a language model is optimized, and the size of a step."""

    batch_tokens: int
    """Tokens of one optimizer step, over all GPUs and accumulated micro-batches."""
    micro_batch_size: int
    """Sequences that one GPU takes through the model at a time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_positive(self, "batch_tokens", "micro_batch_size")


@dataclass(frozen=True, kw_only=True)
class ExampleOptimConfig(AdamWConfig):
    """How a classifier is optimized, and the size of a step."""

    batch_size: int
    """Examples of one optimizer step, over all GPUs."""
    eval_batch_size: int | None = None
    """Examples that one GPU takes through the model at a time where it is scored; None: as many as
    in training."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_positive(self, "batch_size")
        if self.eval_batch_size is not None:
            _check_positive(self, "eval_batch_size")


def _check_positive(config: AdamWConfig, *names: str) -> None:
    for name in names:
        if getattr(config, name) < 1:
            raise ValueError(f"optim.{name} must be at least 1, got {getattr(config, name)}")


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


def make_optimizer(
    model: nn.Module, config: AdamWConfig, *, capturable: bool = False
) -> torch.optim.AdamW:
    """AdamW over the parameters of `model`: matrices and embeddings decay, vectors do not.

    Args:
        capturable: keep the learning rate and the number of steps on the GPU, so that a step can be
            captured in a CUDA graph.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups,
        lr=torch.tensor(config.lr, device=parameters[0].device) if capturable else config.lr,
        betas=config.betas,
        eps=config.eps,
        # One kernel for all parameters instead of a dozen for each.
        fused=parameters[0].is_cuda,
        capturable=capturable,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Use `lr` from the next step on."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)  # a captured step reads this tensor
        else:
            group["lr"] = lr
