"""Muon and NorMuon: orthogonalized updates of matrices, AdamW for all other parameters."""

from collections import defaultdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels.fused.cast_cache import find_casts, mark_written
from kernels.fused.dispatch import module_of
from training.adamw import AdamW, lr_on
from training.distributed import local_tensor
from training.orthogonalize import orthogonalize
from training.sharded_muon import apply_to_whole, batch_size, sum_over_shards

_EPS = 1e-7
_BATCH_ELEMENTS = 2**26
"""Elements that a process updates at once, unless a matrix has more. The temporary tensors of a
step take up to 16 bytes for each on a GPU, 1 GiB, while no activations are in memory."""
_RMS = 0.2  # typical root mean square of AdamW's updates


class Muon(AdamW):
    """Muon for parameter groups with `momentum`, which must be matrices; AdamW for other groups.

    Such a group may also have `normalize_rows` (NorMuon); see `AdamWConfig`.
    """

    def __init__(self, groups: Any, **settings: Any) -> None:
        """Create the optimizer; arguments as for `AdamW`.

        Raises:
            ValueError: a parameter of a group with momentum is not a matrix.
        """
        super().__init__(groups, **settings)
        self._updates: dict[tuple[Tensor, str], Any] = {}  # by first weight and implementation
        for group in self.param_groups:
            group.setdefault("momentum", None)
            group.setdefault("normalize_rows", False)
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
        skip: Tensor | None = getattr(self, "found_inf", None)
        divisor: Tensor | None = getattr(self, "grad_scale", None)
        states = [self._state_of(weight, group) for weight in weights]
        first, device = weights[0], weights[0].device
        increment = torch.ones((), device=device) if skip is None else (skip == 0).float()
        torch._foreach_add_([state["step"] for state in states], [increment] * len(states))
        grads = [local_tensor(w.grad) for w in weights if w.grad is not None]
        weights = [local_tensor(weight) for weight in weights]
        buffers = [local_tensor(state["momentum_buffer"]) for state in states]
        impl = self._select_impl(list(zip(weights, grads, strict=True)))
        if (first, impl) not in self._updates:
            self._updates[first, impl] = module_of(impl, "muon").MuonUpdate()
        parts = self._updates[first, impl]
        y = parts.momentum(grads, buffers, momentum=group["momentum"], divisor=divisor, skip=skip)
        y = apply_to_whole(partial(orthogonalize, impl=impl), y, first)
        casts, factors = find_casts(weights), _row_factors(group, y, states, first, skip)
        lr, weight_decay = lr_on(device, group), group["weight_decay"]
        parts.apply(weights, casts, y, factors, lr=lr, weight_decay=weight_decay, skip=skip)
        mark_written(weights, casts)

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


def _row_factors(
    group: dict[str, Any], y: Tensor, states: list[dict[str, Tensor]], weight: Tensor,
    skip: Tensor | None,
) -> Tensor:  # fmt: skip
    """Factor of each row of orthogonalized matrices y, (B, m, 1) fp32; updates `row_squares`."""
    rows, columns = weight.shape
    if not group["normalize_rows"]:
        size = _RMS * max(rows, columns) ** 0.5
        return y.new_full((*y.shape[:2], 1), size, dtype=torch.float32)
    norms = torch.linalg.vector_norm(y, dim=-1, keepdim=True, dtype=torch.float32)
    squares = [local_tensor(state["row_squares"]) for state in states]
    old = torch.stack(squares)
    means = old.float().lerp(norms.square() / columns, 1 - group["betas"][1])
    torch._foreach_copy_(squares, [*(means if skip is None else means.where(skip == 0, old))])
    factors = 1 / means.sqrt().clamp(min=_EPS)
    size = sum_over_shards((norms * factors).square().sum(1, keepdim=True), weight).sqrt()
    return factors * (_RMS * (rows * columns) ** 0.5 / size.clamp(min=_EPS))
