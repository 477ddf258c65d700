"""Muon: orthogonalized updates of the matrices, AdamW for all other parameters."""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from kernels.fused.cast_cache import active_cast_cache
from training.adamw import AdamW
from training.distributed import local_tensor
from training.sharded_muon import apply_to_whole, batch_size

_QUINTIC = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_EPS = 1e-7
_BATCH_ELEMENTS = 2**25
"""Elements that a process updates at once, unless a matrix has more. The temporary tensors of a
step take 32 bytes for each, 1 GiB, while no activations are in memory."""
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
            size = batch_size(weights[0], _BATCH_ELEMENTS)
            for first in range(0, len(weights), size):
                self._step_batch(group, weights[first : first + size])

    def _step_batch(self, group: dict[str, Any], weights: list[Tensor]) -> None:
        """Update matrices of one shape (M, N) at once; of sharded ones, this process's rows."""
        momentum, lr = group["momentum"], group["lr"]
        skip: Tensor | None = getattr(self, "found_inf", None)
        divisor: Tensor | None = getattr(self, "grad_scale", None)
        for weight in weights:
            if not self.state[weight]:
                # PyTorch's Adam code, which loads this state, expects a step for each parameter.
                self.state[weight]["step"] = torch.zeros((), device=weight.device)
                self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
        first = weights[0]
        buffers = [local_tensor(self.state[weight]["momentum_buffer"]) for weight in weights]
        device = weights[0].device
        increment = torch.ones((), device=device) if skip is None else (skip == 0).float()
        steps = [self.state[weight]["step"] for weight in weights]
        torch._foreach_add_(steps, [increment] * len(steps))
        grads = torch.stack([local_tensor(w.grad) for w in weights if w.grad is not None])
        weights = [local_tensor(weight) for weight in weights]
        if divisor is not None:
            grads = grads / divisor
        before = torch.stack(buffers)
        means = before.lerp(grads, 1 - momentum)
        rows, columns = first.shape
        scale = _RMS * max(rows, columns) ** 0.5
        update = apply_to_whole(orthogonalize, grads.lerp(means, momentum), first)
        update = update.to(grads.dtype) * (lr * scale)
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
