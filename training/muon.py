"""Muon for the matrices of a model's blocks, AdamW for all else, in one optimizer.

Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; the scale of a step
is that of Liu et al. 2025, "Muon is Scalable for LLM Training" (arXiv 2502.16982).
`torch.optim.Muon` computes the same, one matrix after the other, and can neither be captured in a
CUDA graph while the learning rate changes nor skip a step that is not finite.
"""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from kernels.fused.cast_cache import active_cast_cache
from training.adamw import AdamW

_QUINTIC = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_EPS = 1e-7
_RMS = 0.2  # of an update's elements, as AdamW's are on the whole


class Muon(AdamW):
    """AdamW, but for groups of parameters with `momentum`, which must be matrices."""

    def __init__(self, groups: Any, **settings: Any) -> None:
        """As `AdamW`'s.

        Raises:
            ValueError: a parameter of a group with momentum is no matrix.
        """
        super().__init__(groups, **settings)
        for group in self.param_groups:
            group.setdefault("momentum", None)
            shapes = [tuple(p.shape) for p in group["params"] if p.dim() != 2]
            if group["momentum"] is not None and shapes:
                raise ValueError(
                    f"Muon steps along orthogonal matrices, and a parameter has shape {shapes[0]}: "
                    "leave it to a group without momentum"
                )

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """As `AdamW.step`; `grad_scale` and `found_inf` count for all groups."""
        if closure is not None:
            raise ValueError("a step of Muon takes no closure: compute the gradients before")
        everything = self.param_groups
        try:
            self.param_groups = [g for g in everything if g["momentum"] is None]
            super().step()
        finally:
            self.param_groups = everything
        for group in everything:
            if group["momentum"] is not None:
                self._orthogonal_step(group)

    def _orthogonal_step(self, group: dict[str, Any]) -> None:
        same: dict[tuple, list[Tensor]] = defaultdict(list)
        for weight in group["params"]:
            if weight.grad is not None:
                same[tuple(weight.shape), weight.dtype, weight.device].append(weight)
        for weights in same.values():
            self._step_of_shape(group, weights)

    def _step_of_shape(self, group: dict[str, Any], weights: list[Tensor]) -> None:
        """Of all matrices (M, N) of one shape at once."""
        momentum, lr = group["momentum"], group["lr"]
        skip: Tensor | None = getattr(self, "found_inf", None)
        divisor: Tensor | None = getattr(self, "grad_scale", None)
        for weight in weights:
            if not self.state[weight]:
                # PyTorch's Adam, whose state is loaded with it, takes it that each has a step
                self.state[weight]["step"] = torch.zeros((), device=weight.device)
                self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
        buffers = [self.state[weight]["momentum_buffer"] for weight in weights]
        taken = torch.ones((), device=weights[0].device) if skip is None else (skip == 0).float()
        steps = [self.state[weight]["step"] for weight in weights]
        torch._foreach_add_(steps, [taken] * len(steps))
        grads = torch.stack([weight.grad for weight in weights if weight.grad is not None])
        if divisor is not None:
            grads = grads / divisor
        before = torch.stack(buffers)
        means = before.lerp(grads, 1 - momentum)
        rows, columns = weights[0].shape
        scale = _RMS * max(rows, columns) ** 0.5
        update = orthogonalised(grads.lerp(means, momentum)).to(grads.dtype) * (lr * scale)
        values = torch.stack(weights)
        after = values * (1 - lr * group["weight_decay"]) - update
        if skip is not None:  # a skipped step may hold what is not finite
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


def orthogonalised(x: Tensor) -> Tensor:
    """Matrices near U V^T of the singular value decompositions U S V^T, in bfloat16.

    A quintic Newton-Schulz iteration, whose singular values end between 0.7 and 1.2.

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
