"""Muon and NorMuon: orthogonalized updates of matrices, AdamW for all other parameters."""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels.fused.cast_cache import active_cast_cache
from training.adamw import AdamW
from training.distributed import local_tensor
from training.sharded_muon import apply_to_whole, batch_size, sum_over_shards

Polynomial = tuple[float, float, float]
"""Coefficients a, b, c of a s + b s^3 + c s^5, applied to each singular value s."""

# Amsel et al. 2025 (arXiv 2505.16932): each polynomial is the closest to 1 on the interval that the
# ones before leave, from [0.001, 1] on.
_POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
)
_SAFETY = 1.01  # room for rounding: a singular value above the interval may grow without bound
POLYNOMIALS: dict[str, tuple[Polynomial, ...]] = {
    "newton_schulz": ((3.4445, -4.7750, 2.0315),) * 5,
    "polar_express": tuple(
        (a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5) for a, b, c in _POLAR_EXPRESS
    ),
}
_EPS = 1e-7
_BATCH_ELEMENTS = 2**25
"""Elements that a process updates at once, unless a matrix has more. The temporary tensors of a
step take 32 bytes for each, 1 GiB, while no activations are in memory."""
_RMS = 0.2  # typical root mean square of AdamW's updates


class Muon(AdamW):
    """Muon for parameter groups with `momentum`, which must be matrices; AdamW for other groups.

    Such a group may also have `normalize_rows` (NorMuon), `orthogonalization`, a key of
    POLYNOMIALS, and `cautious_decay`; see `AdamWConfig`.
    """

    def __init__(self, groups: Any, **settings: Any) -> None:
        """Create the optimizer; arguments as for `AdamW`.

        Raises:
            ValueError: a parameter of a group with momentum is not a matrix.
        """
        super().__init__(groups, **settings)
        for group in self.param_groups:
            group.setdefault("momentum", None)
            group.setdefault("normalize_rows", False)
            group.setdefault("orthogonalization", "newton_schulz")
            group.setdefault("cautious_decay", False)
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
        states = [self._state_of(weight, group) for weight in weights]
        first, device = weights[0], weights[0].device
        increment = torch.ones((), device=device) if skip is None else (skip == 0).float()
        torch._foreach_add_([state["step"] for state in states], [increment] * len(states))
        grads = torch.stack([local_tensor(w.grad) for w in weights if w.grad is not None])
        weights = [local_tensor(weight) for weight in weights]
        if divisor is not None:
            grads = grads / divisor
        buffers = [local_tensor(state["momentum_buffer"]) for state in states]
        means = torch.stack(buffers).lerp(grads, 1 - momentum)
        function = partial(orthogonalize, polynomials=POLYNOMIALS[group["orthogonalization"]])
        update = apply_to_whole(function, grads.lerp(means, momentum), first).to(grads.dtype)
        rows, columns = first.shape
        if group["normalize_rows"]:
            squares = [local_tensor(state["row_squares"]) for state in states]
            square = update.square().mean(-1, keepdim=True)
            mean = torch.stack(squares).lerp(square, 1 - group["betas"][1])
            _write(squares, mean, skip)
            update = update / mean.sqrt().clamp(min=_EPS)
            size = sum_over_shards(update.square().sum((-2, -1), keepdim=True), first).sqrt()
            update = update * (_RMS * (rows * columns) ** 0.5 / size.clamp(min=_EPS))
        else:
            update = update * (_RMS * max(rows, columns) ** 0.5)
        values = torch.stack(weights)
        decayed = values * (1 - lr * group["weight_decay"])
        if group["cautious_decay"]:
            decayed = torch.where(values * update > 0, decayed, values)
        _write(buffers, means, skip)
        _write(weights, decayed - update * lr, skip)
        cache = active_cast_cache()
        if cache is not None:
            casts = [(cast, w) for w in weights if (cast := cache.find(w)) is not None]
            for cast, weight in casts:
                cast.copy_(weight)
            cache.mark_written(weight for _, weight in casts)

    def _state_of(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """State of a matrix, which is created if there is none."""
        state = self.state[weight]
        if not state:
            # PyTorch's Adam code, which loads this state, expects a step for each parameter.
            state["step"] = torch.zeros((), device=weight.device)
            state["momentum_buffer"] = torch.zeros_like(weight)
            if group["normalize_rows"]:
                state["row_squares"] = torch.zeros_like(weight[:, :1])
        return state


def _write(tensors: list[Tensor], values: Tensor, skip: Tensor | None) -> None:
    """Write each of `values` into its tensor, unless the step is skipped."""
    if skip is not None:  # a skipped step may contain values that are not finite
        values = torch.where(skip > 0, torch.stack(tensors), values)
    torch._foreach_copy_(tensors, [*values])


def orthogonalize(x: Tensor, polynomials: Sequence[Polynomial]) -> Tensor:
    """Approximate U V^T of the singular value decomposition x = U S V^T, in bfloat16.

    Args:
        x: (B, M, N), floating.
        polynomials: applied in this order to the singular values, which start at 1 or below.
    """
    wide = x.shape[-2] <= x.shape[-1]
    y = x.bfloat16() if wide else x.bfloat16().mT
    y = y / y.norm(dim=(-2, -1), keepdim=True).clamp(min=_EPS)
    for a, b, c in polynomials:
        gram = y @ y.mT
        y = torch.baddbmm(y, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y if wide else y.mT
