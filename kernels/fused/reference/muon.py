"""Elementwise parts of Muon's step in PyTorch: the reference for the kernels."""

import torch
from torch import Tensor


class MuonUpdate:
    """Elementwise parts of Muon's step for one batch of matrices (M, N)."""

    def momentum(
        self, grads: list[Tensor], buffers: list[Tensor], *, momentum: float,
        divisor: Tensor | None, skip: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Update the momentum buffers and combine them with the gradients (Nesterov).

        Args:
            grads: (M, N) each, not changed.
            buffers: (M, N) each, moving averages of the gradients, written.
            momentum: share of the old average in the new one.
            divisor: () fp32; gradients are divided by it. None: 1.
            skip: () fp32; unless it is 0, buffers do not change and the result must not be used.
                None: 0.

        Returns:
            (B, M, N) bf16.
        """
        batch = torch.stack(grads)
        if divisor is not None:
            batch /= divisor
        old = torch.stack(buffers)
        new = old.lerp(batch, 1 - momentum)
        batch.lerp_(new, momentum)
        _write(buffers, old, new, skip)
        return batch.bfloat16()

    def apply(
        self, weights: list[Tensor], casts: list[Tensor | None], update: Tensor, factors: Tensor,
        *, lr: Tensor, weight_decay: float, skip: Tensor | None,
    ) -> None:  # fmt: skip
        """Decay the weights and subtract the update.

        Args:
            weights: (M, N) each, written.
            casts: for each weight, its cast, written as well, or None.
            update: (B, M, N) floating, in any strides.
            factors: (B, M, 1) fp32, positive; rows of the update are multiplied by them and by lr.
            lr: () fp32.
            weight_decay: share of a weight that is subtracted, before it is multiplied by lr.
            skip: () fp32; unless it is 0, nothing changes. None: 0.
        """
        old = torch.stack(weights)
        new = old * (1 - lr * weight_decay)
        new -= update * (factors * lr)
        _write(weights, old, new, skip)
        for weight, cast in zip(weights, casts, strict=True):
            if cast is not None:
                cast.copy_(weight)


def _write(tensors: list[Tensor], old: Tensor, new: Tensor, skip: Tensor | None) -> None:
    """Write `new` into the tensors, or `old` if the step is skipped; overwrites `new`."""
    if skip is not None:  # a skipped step may contain values that are not finite
        torch.where(skip == 0, new, old, out=new)
    torch._foreach_copy_(tensors, [*new])
