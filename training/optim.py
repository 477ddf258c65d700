"""AdamW and Muon, parameter groups and the learning rate schedule."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from kernels import triton
from kernels.fused.cast_cache import active_cast_cache
from kernels.fused.dispatch import module_of, select_impl
from training.config import AdamWConfig
from training.distributed import local_tensor

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
    """Log lines about settings of the optimizer that changed at step `step`."""
    changed = {
        field.name: f"optim.{field.name} changed from {old} to {new}"
        for field in fields(AdamWConfig)
        if (old := getattr(before, field.name)) != (new := getattr(now, field.name))
    }
    schedule = [changed.pop(name) for name in _SCHEDULE if name in changed]
    lines = [", ".join(changed.values())] if changed else []
    old_lr, new_lr = learning_rate(step, before), learning_rate(step, now)
    if schedule and not (old_lr == new_lr and before.schedule == now.schedule == "constant"):
        instead = "" if old_lr == new_lr else f" instead of {old_lr:.3g}"
        line = f"{', '.join(schedule)}: the learning rate continues at {new_lr:.3g}{instead}"
        lines.append(line)
    return lines


class AdamW(torch.optim.AdamW):
    """Fused AdamW with one kernel launch per parameter group, on a GPU.

    The kernel also writes the cached casts of the weights (`kernels.fused.cast_cache`). PyTorch's
    fused AdamW needs several launches, because it passes tensor addresses as kernel arguments. It
    also writes scaled gradients back to memory, while this one leaves gradients unchanged. State
    and settings are compatible with `torch.optim.AdamW(fused=True)`, in both directions. For
    sharded weights (DTensor), each process updates its shard.
    """

    _impl: str | None = None
    _launches: Sequence[Any] = ()

    def __init__(self, groups: Any, *, impl: str | None = None, **settings: Any) -> None:
        """Create the optimizer; arguments as for `torch.optim.AdamW`.

        Args:
            impl: "triton" (the kernel) or "reference" (PyTorch's); None selects one at each step.
                If the chosen one does not support a step, that step raises ValueError.
        """
        super().__init__(groups, fused=True, **settings)
        self._impl = impl

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take a step on all weights that have a gradient.

        Two attributes are read if they are set, as in PyTorch's fused optimizers: all gradients are
        divided by `grad_scale`, and the step is skipped if `found_inf` is not 0. Both are () fp32
        on the device of the weights.
        """
        weights = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if closure is not None or not weights:
            return super().step(closure)
        parts = [(local_tensor(w), local_tensor(w.grad)) for w in weights]
        reason = _unsupported_reason(parts)
        if select_impl(self._impl, parts[0][0], triton=reason) == "reference":
            sharded = any(isinstance(weight, DTensor) for weight in weights)
            return self._step_shards() if sharded else super().step()
        if len(self._launches) != len(self.param_groups):
            launch = module_of("triton", "adamw").AdamWLaunch
            self._launches = [launch() for _ in self.param_groups]
        for group, launch in zip(self.param_groups, self._launches, strict=True):
            self._step_group(group, launch)
        return None

    def _local_tensors(self, group: dict[str, Any]) -> list[list[Tensor]]:
        """Local weights, gradients, both moments, an empty list (for AMSGrad), and step counts."""
        lists: list[list[Tensor]] = [[] for _ in range(6)]
        self._init_group(group, *lists)
        return [[local_tensor(x) for x in tensors] for tensors in lists]

    def _step_shards(self) -> None:
        """Take PyTorch's step on local shards: it cannot mix DTensors with plain scalar tensors."""
        for group in self.param_groups:
            weights, grads, means, squares, max_squares, steps = self._local_tensors(group)
            adamw(
                weights, grads, means, squares, max_squares, steps,
                fused=True,
                grad_scale=getattr(self, "grad_scale", None),
                found_inf=getattr(self, "found_inf", None),
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )  # fmt: skip

    def _step_group(self, group: dict[str, Any], launch: Any) -> None:
        weights, grads, means, squares, _, steps = self._local_tensors(group)
        if not weights:
            return
        skip: Tensor | None = getattr(self, "found_inf", None)
        # The increment is on the GPU. PyTorch would synchronize on a single one, but not on a list.
        increment = [torch.ones_like(steps[0]) if skip is None else (skip == 0).to(steps[0])]
        torch._foreach_add_(steps, increment * len(steps))
        lr, device = group["lr"], weights[0].device
        if not isinstance(lr, Tensor) or lr.device != device:  # so while state is loaded
            lr = torch.full((), float(lr), device=device)
        cache = active_cast_cache()
        casts = [None if cache is None else cache.find(weight) for weight in weights]
        launch(
            list(zip(weights, [g.contiguous() for g in grads], means, squares, steps, strict=True)),
            casts,
            lr=lr,
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            divisor=getattr(self, "grad_scale", None),
            skip=skip,
        )
        torch.autograd.graph.increment_version(weights)
        if cache is not None:
            written = zip(weights, casts, strict=True)
            cache.mark_written(weight for weight, cast in written if cast is not None)


def _unsupported_reason(weights: Sequence[tuple[Tensor, Tensor]]) -> str | None:
    """Why the kernel does not support these pairs of weight and gradient, or None if it does."""
    for weight, grad in weights:
        reason = triton.unsupported_device(weight, "a weight")
        if reason is not None:
            return reason
        if weight.is_cuda and triton.is_interpreted():
            return "TRITON_INTERPRET=1 runs kernels on the CPU, which cannot read tensors of a GPU"
        if type(grad) is not Tensor:
            return f"gradients must be plain tensors, and one is a {type(grad).__name__}"
        if not weight.is_contiguous():
            return (
                f"weights must be contiguous, and one has shape {tuple(weight.shape)} and strides "
                f"{weight.stride()}"
            )
        if weight.dtype != torch.float32 or weight.device != weights[0][0].device:
            return (
                "weights must be float32 and on one device, and one is "
                f"{weight.dtype} on {weight.device}"
            )
    return None


_QUINTIC = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_EPS = 1e-7
_RMS = 0.2  # typical root mean square of AdamW's updates


class Muon(AdamW):
    """Muon for parameter groups with `momentum`, which must be matrices; AdamW for other groups."""

    def __init__(self, groups: Any, **settings: Any) -> None:
        """Create the optimizer; arguments as for `AdamW`.

        Raises:
            ValueError: a parameter of a group with momentum is not a matrix.
        """
        super().__init__(groups, **settings)
        for group in self.param_groups:
            group.setdefault("momentum", None)
            shapes = [tuple(p.shape) for p in group["params"] if p.dim() != 2]
            if group["momentum"] is not None and shapes:
                raise ValueError(
                    f"Muon needs matrices, and a parameter has shape {shapes[0]}. Move it to a "
                    "group without momentum"
                )

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take a step; `grad_scale` and `found_inf` apply to all groups, as in `AdamW.step`."""
        if closure is not None:
            raise ValueError("Muon.step does not support a closure. Compute the gradients first")
        groups = self.param_groups
        try:
            self.param_groups = [g for g in groups if g["momentum"] is None]
            super().step()
        finally:
            self.param_groups = groups
        for group in groups:
            if group["momentum"] is not None:
                self._orthogonal_step(group)

    def _orthogonal_step(self, group: dict[str, Any]) -> None:
        batches: dict[tuple, list[Tensor]] = defaultdict(list)
        for weight in group["params"]:
            if weight.grad is not None:
                batches[tuple(weight.shape), weight.dtype, weight.device].append(weight)
        for weights in batches.values():
            self._step_batch(group, weights)

    def _step_batch(self, group: dict[str, Any], weights: list[Tensor]) -> None:
        """Update all matrices of one shape (M, N) at once."""
        momentum, lr = group["momentum"], group["lr"]
        skip: Tensor | None = getattr(self, "found_inf", None)
        divisor: Tensor | None = getattr(self, "grad_scale", None)
        for weight in weights:
            if not self.state[weight]:
                # PyTorch's Adam code, which loads this state, expects a step for each parameter.
                self.state[weight]["step"] = torch.zeros((), device=weight.device)
                self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
        buffers = [self.state[weight]["momentum_buffer"] for weight in weights]
        device = weights[0].device
        increment = torch.ones((), device=device) if skip is None else (skip == 0).float()
        steps = [self.state[weight]["step"] for weight in weights]
        torch._foreach_add_(steps, [increment] * len(steps))
        grads = torch.stack([weight.grad for weight in weights if weight.grad is not None])
        if divisor is not None:
            grads = grads / divisor
        before = torch.stack(buffers)
        means = before.lerp(grads, 1 - momentum)
        rows, columns = weights[0].shape
        scale = _RMS * max(rows, columns) ** 0.5
        update = orthogonalize(grads.lerp(means, momentum)).to(grads.dtype) * (lr * scale)
        values = torch.stack(weights)
        after = values * (1 - lr * group["weight_decay"]) - update
        if skip is not None:  # a skipped step may contain values that are not finite
            after, means = (
                torch.where(skip > 0, values, after),
                torch.where(skip > 0, before, means),
            )
        torch._foreach_copy_(buffers, [*means])
        torch._foreach_copy_(weights, [*after])
        cache = active_cast_cache()
        if cache is not None:
            casts = [(cast, w) for w in weights if (cast := cache.find(w)) is not None]
            for cast, weight in casts:
                cast.copy_(weight)
            cache.mark_written(weight for _, weight in casts)


def orthogonalize(x: Tensor) -> Tensor:
    """Approximate U V^T of the singular value decomposition x = U S V^T, in bfloat16.

    Uses a quintic Newton-Schulz iteration; resulting singular values are between 0.7 and 1.2.

    Args:
        x: (B, M, N), floating.
    """
    a, b, c = _QUINTIC
    wide = x.shape[-2] <= x.shape[-1]
    y = x.bfloat16() if wide else x.bfloat16().mT
    y = y / y.norm(dim=(-2, -1), keepdim=True).clamp(min=_EPS)
    for _ in range(_ITERATIONS):
        gram = y @ y.mT
        y = torch.baddbmm(y, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y if wide else y.mT


def make_optimizer(model: nn.Module, config: AdamWConfig, *, capturable: bool = False) -> AdamW:
    """Optimizer of `model`: AdamW with weight decay on matrices and embeddings, not on vectors.

    With optim.name=muon, Muon updates the matrices of the blocks, with the same weight decay. If
    `capturable`, the learning rate and the step counts stay on the GPU, so that a step can be
    captured in a CUDA graph.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    parameters = [p for _, p in named]
    hidden = []
    if config.name == "muon":
        hidden = [p for name, p in named if ".blocks." in f".{name}" and p.dim() == 2]
    muon_ids = set(map(id, hidden))
    decayed = [p for p in parameters if p.dim() >= 2 and id(p) not in muon_ids]
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
    """Set the learning rate of all parameter groups."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)  # a captured step reads this tensor
        else:
            group["lr"] = lr
