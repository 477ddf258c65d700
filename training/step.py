"""Training step: forward, backward, clipping and optimizer, optionally in a CUDA graph."""

from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kernels.fused.cast_cache import CastCache
from training.distributed import average_unsharded_gradients
from training.finite_steps import FiniteSteps

# Calls in which torch.compile, cuBLAS, NCCL and the optimizer allocate the memory that they keep.
# DistributedDataParallel also times itself in its first ten calls.
_WARM_UP = 3
_WARM_UP_DISTRIBUTED = 12

LossOf = Callable[..., tuple[Tensor, ...]]
"""Function of a model and the tensors of a micro-batch. It returns the mean loss, with a gradient,
and other values that are averaged over steps, () each."""


def train_step(loss_of: LossOf, model: nn.Module, finite: FiniteSteps, *batch: Tensor) -> None:
    """Take one optimizer step on the mean loss over the micro-batches of all processes.

    Nothing here waits for the GPU, so the step can be captured in a CUDA graph.

    Args:
        loss_of: loss of a micro-batch.
        model: wrapped in DistributedDataParallel or FSDP2 if there are several processes.
        finite: clips gradients and takes the optimizer step, unless a value is not finite.
        batch: (M, ...) each, M micro-batches of this process. Their gradients are accumulated, and
            exchanged once.
    """
    finite.optimizer.zero_grad(set_to_none=True)
    n = len(batch[0])
    means: list[Tensor] = []
    for number, micro_batch in enumerate(zip(*batch, strict=True)):
        if isinstance(model, DistributedDataParallel):
            model.require_backward_grad_sync = number == n - 1
        values = loss_of(model, *micro_batch)
        (values[0] / n).backward()
        shares = [value.detach() / n for value in values]
        means = list(map(torch.add, means, shares)) if means else shares
    average_unsharded_gradients(model)
    finite(*means)


class GraphedStep:
    """Training step that is captured in a CUDA graph after a few warmup calls, then replayed.

    The kernels of a small model take less time than the CPU needs to launch them one by one. Every
    call is a real training step, including warmup and capture. On a CPU it stays a plain call.
    """

    def __init__(
        self,
        step: Callable[..., None],
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        *,
        capture: bool = True,
        cache_casts: bool = True,
    ) -> None:
        """Wrap a step; nothing runs yet.

        The step takes tensors of constant shapes and returns nothing. It writes its results into
        tensors allocated before, and never waits for the GPU. It must set the gradients of the
        optimizer's parameters to None before it computes them.

        Args:
            step: the step to capture.
            optimizer: its gradients are set to None before capture.
            device: where the step runs.
            capture: False keeps `step` a plain call.
            cache_casts: cache casts of weights, which must then not move in memory.
        """
        self._step = step
        self._optimizer = optimizer
        self._captures = capture and device.type == "cuda"
        # One stream for warmup and capture: cuBLAS keeps a workspace for each stream that it used.
        self._stream = torch.cuda.Stream(device) if self._captures else None
        self._device = device
        self._cast_cache = CastCache() if cache_casts else None
        self._calls = 0
        self._warm_up = _WARM_UP_DISTRIBUTED if dist.is_initialized() else _WARM_UP
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: tuple[Tensor, ...] = ()

    @property
    def captures_next(self) -> bool:
        """Whether the next call captures the step, which takes longer than running it."""
        return self._captures and self._graph is None and self._calls == self._warm_up

    def __call__(self, *inputs: Tensor) -> None:
        """Take a step; inputs on the CPU are copied while the GPU works on the last step."""
        if self._device.type == "cuda":
            inputs = tuple(x if x.is_cuda else x.pin_memory() for x in inputs)
        if not self._inputs:
            self._inputs = tuple(torch.empty_like(x, device=self._device) for x in inputs)
        for static, value in zip(self._inputs, inputs, strict=True):
            static.copy_(value, non_blocking=True)
        with self._cast_cache.activate() if self._cast_cache else nullcontext():
            self._run()

    def _run(self) -> None:
        if self._graph is not None:
            self._graph.replay()
            return
        self._calls += 1
        if not self._captures:
            self._step(*self._inputs)
        elif self._calls <= self._warm_up:
            self._warm_up_step()
        else:
            self._capture()

    def _warm_up_step(self) -> None:
        """Run the step on the side stream, as CUDA graphs require before capture."""
        stream = self._stream
        assert stream is not None
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._step(*self._inputs)
        torch.cuda.current_stream(self._device).wait_stream(stream)

    def _capture(self) -> None:
        # The graph allocates its own gradients, in memory that it keeps.
        self._optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        # thread_local, as another thread may be saving a checkpoint.
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            self._step(*self._inputs)
        self._graph = graph
        graph.replay()
