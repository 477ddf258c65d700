"""AdamW, fused, on whole and on sharded weights."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from kernels import triton
from kernels.fused.cast_cache import find_casts, mark_written
from kernels.fused.dispatch import module_of, select_impl
from training.distributed import local_tensor


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
        if self._select_impl(parts) == "reference":
            sharded = any(isinstance(weight, DTensor) for weight in weights)
            return self._step_shards() if sharded else super().step()
        if len(self._launches) != len(self.param_groups):
            launch = module_of("triton", "adamw").AdamWLaunch
            self._launches = [launch() for _ in self.param_groups]
        for group, launch in zip(self.param_groups, self._launches, strict=True):
            self._step_group(group, launch)
        return None

    def _select_impl(self, parts: Sequence[tuple[Tensor, Tensor]]) -> str:
        """Select the implementation for these pairs of local weight and gradient."""
        return select_impl(self._impl, parts[0][0], triton=_unsupported_reason(parts))

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
        casts = find_casts(weights)
        launch(
            list(zip(weights, [g.contiguous() for g in grads], means, squares, steps, strict=True)),
            casts,
            lr=lr_on(weights[0].device, group),
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            divisor=getattr(self, "grad_scale", None),
            skip=skip,
        )
        torch.autograd.graph.increment_version(weights)
        mark_written(weights, casts)


def lr_on(device: torch.device, group: dict[str, Any]) -> Tensor:
    """Learning rate of a parameter group as a tensor on `device`."""
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.device == device:
        return lr
    return torch.full((), float(lr), device=device)  # a tensor elsewhere while state is loaded


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
