"""AdamW whose step is one kernel on a GPU."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from kernels import triton
from kernels.fused.cast_cache import active_cast_cache
from kernels.fused.dispatch import module_of, select_impl
from training.sharded import local


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW(fused=True)` with one launch for each group of weights on a GPU, which
    also writes the cached casts of the weights (`kernels.fused.cast_cache`).

    PyTorch's takes several, as it has the addresses of tensors in the arguments of a kernel, and
    writes gradients that it divides back to memory, where this leaves them as they were. State and
    settings are the same: what one has saved, the other loads. Of weights that processes share out
    (DTensor), each steps with its part.
    """

    _impl: str | None = None
    _launches: Sequence[Any] = ()

    def __init__(self, groups: Any, *, impl: str | None = None, **settings: Any) -> None:
        """As the parent's.

        Args:
            impl: "triton" (the kernel) or "reference" (PyTorch's); None picks at each step. One
                that cannot serve it makes the step raise ValueError.
        """
        super().__init__(groups, fused=True, **settings)
        self._impl = impl

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take a step with the gradients that are there.

        As of PyTorch's fused optimizers, attributes are read if they are set: `grad_scale`, which
        divides all gradients, and `found_inf`, which skips the step where it is not 0, () fp32
        each on the device of the weights.
        """
        weights = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if closure is not None or not weights:
            return super().step(closure)
        parts = [(local(w), local(w.grad)) for w in weights]
        reason = _unsupported_reason(parts)
        if select_impl(self._impl, parts[0][0], triton=reason) == "reference":
            shared = any(isinstance(weight, DTensor) for weight in weights)
            return self._step_of_parts() if shared else super().step()
        if len(self._launches) != len(self.param_groups):
            launch = module_of("triton", "adamw").AdamWLaunch
            self._launches = [launch() for _ in self.param_groups]
        for group, launch in zip(self.param_groups, self._launches, strict=True):
            self._step_of(group, launch)
        return None

    def _parts(self, group: dict[str, Any]) -> list[list[Tensor]]:
        """Weights, gradients, their two moments, none, and steps."""
        lists: list[list[Tensor]] = [[] for _ in range(6)]
        self._init_group(group, *lists)
        return [[local(x) for x in kind] for kind in lists]

    def _step_of_parts(self) -> None:
        """PyTorch's, which takes no plain numbers beside weights that are shared out."""
        for group in self.param_groups:
            weights, grads, means, squares, largest, steps = self._parts(group)
            adamw(
                weights, grads, means, squares, largest, steps,
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

    def _step_of(self, group: dict[str, Any], launch: Any) -> None:
        weights, grads, means, squares, _, steps = self._parts(group)
        if not weights:
            return
        skip: Tensor | None = getattr(self, "found_inf", None)
        # one of the numbers is on the GPU, and PyTorch waits for it unless each has one of its own
        taken = [torch.ones_like(steps[0]) if skip is None else (skip == 0).to(steps[0])]
        torch._foreach_add_(steps, taken * len(steps))
        lr, device = group["lr"], weights[0].device
        if not isinstance(lr, Tensor) or lr.device != device:  # as it is while state is loaded
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
    """Why the kernel cannot serve them and their gradients, None if it can."""
    for weight, grad in weights:
        reason = triton.unsupported_device(weight, "a weight")
        if reason is not None:
            return reason
        if weight.is_cuda and triton.is_interpreted():
            return "TRITON_INTERPRET=1 is set, and the CPU cannot read where a GPU's tensors lie"
        if type(grad) is not Tensor:
            return f"it takes plain tensors, and a gradient is a {type(grad).__name__}"
        if not weight.is_contiguous():
            return (
                "it takes contiguous weights, and one has shape "
                f"{tuple(weight.shape)} and strides {weight.stride()}"
            )
        if weight.dtype != torch.float32 or weight.device != weights[0][0].device:
            return (
                "it takes weights in float32 on one device, and one is "
                f"{weight.dtype} on {weight.device}"
            )
    return None
