"""AdamW and Muon, their parameter groups and the learning rate schedule."""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from kernels import triton
from kernels.fused.cast_cache import active_cast_cache
from kernels.fused.dispatch import module_of, select_impl
from training.config import AdamWConfig
from training.distributed import local


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


def schedule_change(step: int, before: AdamWConfig, now: AdamWConfig) -> str | None:
    """What changes with step `step` as the settings are no longer those of `before`, if it does."""
    names = ("max_steps", "lr", "min_lr", "schedule", "warmup_steps")
    values = [(name, getattr(before, name), getattr(now, name)) for name in names]
    changes = [
        f"optim.{name} was {was} and is {now_is}" for name, was, now_is in values if was != now_is
    ]
    was, is_now = learning_rate(step, before), learning_rate(step, now)
    if not changes or (was == is_now and before.schedule == now.schedule == "constant"):
        return None
    return (
        f"the schedule changes, as {', '.join(changes)}: the learning rate goes on with "
        f"{is_now:.3g}, where it was to be {was:.3g}"
    )


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
        """Take PyTorch's step on the parts of this process: it mixes no numbers with DTensors."""
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
        """Step all matrices (M, N) of one shape at once."""
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


def make_optimizer(model: nn.Module, config: AdamWConfig, *, capturable: bool = False) -> AdamW:
    """AdamW over the parameters of `model`: matrices and embeddings decay, vectors do not.

    With optim.name=muon the matrices of its blocks are Muon's, and decay, too.

    If `capturable`, the learning rate and the number of steps stay on the GPU, so that a step can
    be captured in a CUDA graph.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    parameters = [p for _, p in named]
    hidden = []
    if config.name == "muon":
        hidden = [p for name, p in named if ".blocks." in f".{name}" and p.dim() == 2]
    taken = set(map(id, hidden))
    decayed = [p for p in parameters if p.dim() >= 2 and id(p) not in taken]
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
    """Use `lr` from the next step on."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)  # a captured step reads this tensor
        else:
            group["lr"] = lr
