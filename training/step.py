"""One training step: forward, backward, clipping and the optimizer, optionally as a CUDA graph."""

from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kernels.fused.cast_cache import CastCache
from training.distributed import average_unsharded_gradients
from training.finite_steps import FiniteSteps

# Calls in which torch.compile, cuBLAS, NCCL and the optimizer allocate what they keep. In the first
# ten DistributedDataParallel also takes the time of its own doing.
_WARM_UP = 3
_WARM_UP_TOGETHER = 12

LossOf = Callable[..., tuple[Tensor, ...]]
"""Called with a model and the tensors of a micro-batch; returns the mean loss, with a gradient, and
other values that are averaged over steps, () each."""


def train_step(loss_of: LossOf, model: nn.Module, finite: FiniteSteps, *batch: Tensor) -> None:
    """Take one step on the mean loss of the micro-batches of all processes.

    Nothing here waits for the GPU, so that the step can be captured in a CUDA graph.

    Args:
        loss_of: the loss of a micro-batch.
        model: as it is trained, by DistributedDataParallel or FSDP2 if there are more processes.
        finite: clips gradients and takes the optimizer's step, unless a number is not finite.
        batch: (M, ...) each, M micro-batches of this process; their gradients add up, and are
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
    """A training step that is captured in a CUDA graph after a few calls and replayed from then on.

    A small model's kernels take less time than the CPU needs to launch them one by one. Every call
    is a step that counts, also those before and the one that is captured. On a CPU it stays a plain
    call.
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
        """Nothing is run yet. Without `capture`, `step` stays a plain call.

        With `cache_casts`, casts of weights are cached: weights must then stay where they are.

        A step takes tensors, returns nothing, and leaves its results in tensors that exist before.
        All shapes are the same each time, and nothing in it waits for the GPU. It must set
        gradients of the optimizer's parameters to None before it computes them.
        """
        self._step = step
        self._optimizer = optimizer
        self._captures = capture and device.type == "cuda"
        # one for all: cuBLAS keeps memory to work in for each stream that it has seen
        self._stream = torch.cuda.Stream(device) if self._captures else None
        self._device = device
        self._cast_cache = CastCache() if cache_casts else None
        self._calls = 0
        self._warm_up = _WARM_UP_TOGETHER if dist.is_initialized() else _WARM_UP
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: tuple[Tensor, ...] = ()

    @property
    def captures_next(self) -> bool:
        """Whether the next call captures the step, which takes longer than a step."""
        return self._captures and self._graph is None and self._calls == self._warm_up

    def __call__(self, *inputs: Tensor) -> None:
        """One step; inputs from the CPU are copied while the GPU still works on the last."""
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
            self._on_side_stream()
        else:
            self._capture()

    def _on_side_stream(self) -> None:
        """One plain call on another stream, as what is captured afterwards must have been once."""
        stream = self._stream
        assert stream is not None
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._step(*self._inputs)
        torch.cuda.current_stream(self._device).wait_stream(stream)

    def _capture(self) -> None:
        # the graph makes its own gradients, in memory that it keeps
        self._optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        # a checkpoint may be on its way to the disk in another thread
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            self._step(*self._inputs)
        self._graph = graph
        graph.replay()
