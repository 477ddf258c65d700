"""The processes of a run, one or as many as torchrun started, and tensors sharded over them."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from kernels.context.exchange import receive_buffer_bytes

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Processes:
    """Where this process stands among those of the run, and the device that it computes on."""

    rank: int
    world_size: int
    device: torch.device
    host_group: dist.ProcessGroup | None = None
    """Of all processes, for what is exchanged on the CPU; None where there is one."""
    mesh: DeviceMesh | None = None
    """Of all processes, (data, context): those of a row share each sequence; None: none do."""

    @property
    def n_context(self) -> int:
        """How many processes share each sequence."""
        return 1 if self.mesh is None else self.mesh.size(1)

    @property
    def n_data(self) -> int:
        """How many sequences are read at a time."""
        return self.world_size // self.n_context

    @property
    def data_rank(self) -> int:
        """Which of them this process reads, with those that share it."""
        return self.rank // self.n_context

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that prints and writes."""
        return self.rank == 0

    @property
    def is_first_here(self) -> bool:
        """Whether this process is the first of those on its machine, which share its disks."""
        return os.environ.get("LOCAL_RANK", "0") == "0"

    def __str__(self) -> str:
        """How many there are, and on what: "8 x NVIDIA H100 80GB HBM3"."""
        if self.device.type == "cuda":
            device = torch.cuda.get_device_name(self.device)
        else:
            device = f"CPU, {torch.get_num_threads()} threads"
        return f"{self.world_size} x {device}"

    def memory_gib(self) -> float | None:
        """Most memory that this GPU's tensors took so far, GiB; None on a CPU."""
        if self.device.type == "cpu":
            return None
        return (torch.cuda.max_memory_allocated(self.device) + receive_buffer_bytes()) / 2**30

    def sum(self, values: Tensor) -> Tensor:
        """The sum of `values` over all processes; in place, and a no-op for one process."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def max(self, values: Tensor) -> Tensor:
        """The largest of `values` over all processes; in place, and a no-op for one process."""
        if self.world_size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values

    def agree(self, value: T) -> T:
        """The main process's `value`, on every process; any object that can be pickled."""
        if self.world_size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values)
        return values[0]

    def main_does(self, work: Callable[[], T]) -> T:
        """What the main process's `work` returns, or its error of user or disk, on every process.

        Raises:
            ValueError, OSError: as `work` raised it. One that it alone knew of would leave the
                others waiting.
        """
        result: T | ValueError | OSError | None = None
        if self.is_main:
            try:
                result = work()
            except (ValueError, OSError) as error:
                result = error
        result = self.agree(result)
        if isinstance(result, (ValueError, OSError)):
            raise result
        return cast(T, result)

    def gather(self, value: T) -> list[T] | None:
        """The values of all processes by rank, on the main one; None on the others."""
        if self.world_size == 1:
            return [value]
        values: list[Any] | None = [None] * self.world_size if self.is_main else None
        dist.gather_object(value, values, group=self.host_group)
        return values

    def leave(self) -> None:
        """Leave the group, where all processes do so: nothing is exchanged any more."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def barrier(self) -> None:
        """Wait until every process is here."""
        if self.world_size > 1:
            dist.barrier()


@contextmanager
def start_processes(
    device: Literal["auto", "cuda", "cpu"], *, context: int = 1
) -> Iterator[Processes]:
    """Join the process group that torchrun describes in the environment, and leave it at the end.

    Args:
        device: to compute on.
        context: how many processes, next to each other by rank, share each sequence.

    Raises:
        ValueError: no GPU where one is asked for, or fewer GPUs than processes on this machine; or
            the number of processes is no multiple of `context`.
    """
    rank = int(os.environ.get("RANK", "0"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    n_gpu = torch.cuda.device_count()
    if device == "cuda" and n_gpu == 0:
        raise ValueError(
            "run.device=cuda, but PyTorch sees no GPU: use run.device=cpu, or check that the "
            "driver works (nvidia-smi) and that torch is a CUDA build (torch.version.cuda)"
        )
    if device == "cpu" or n_gpu == 0:
        here = torch.device("cpu")
    elif local_rank >= n_gpu:
        raise ValueError(
            f"torchrun started process {local_rank} of this machine, which has {n_gpu} GPU(s): "
            f"use --nproc_per_node={n_gpu} or fewer"
        )
    else:
        here = torch.device("cuda", local_rank)
        torch.cuda.set_device(here)

    if world_size % context:
        raise ValueError(
            f"parallel.context={context} processes share each sequence, and there are "
            f"{world_size}: start a multiple of {context} with torchrun"
        )
    if world_size > 1:
        if here.type == "cuda":
            # or an exchange waits until kernels have left room that fill the GPU
            os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
            dist.init_process_group("nccl", device_id=here)
        else:
            dist.init_process_group("gloo")
        if "TORCHELASTIC_RUN_ID" in os.environ:
            Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    host_group = cast(Any, dist.new_group(backend="gloo")) if world_size > 1 else None
    mesh = None
    if context > 1:
        shape = world_size // context, context
        mesh = init_device_mesh(here.type, shape, mesh_dim_names=("data", "context"))
    processes = Processes(
        rank=rank, world_size=world_size, device=here, host_group=host_group, mesh=mesh
    )
    yield processes
    # Not after an error: NCCL would wait here for the others, and the error would not be shown.
    processes.leave()


def _end_with(launcher: int) -> None:
    """End by SIGTERM, as on its behalf, when torchrun was killed and can send none."""
    while os.getppid() == launcher:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)


def local(x: Tensor) -> Tensor:
    """This process's part of a tensor, sharing its memory; x itself where it has all of it."""
    return x.to_local() if isinstance(x, DTensor) else x


def whole(x: Tensor) -> Tensor:
    """All of a tensor, on its device. Where processes hold parts, all must ask for it."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def shared_as(x: Tensor, other: Tensor) -> Tensor:
    """x, which each process has all of, shared out as `other` is."""
    if not isinstance(other, DTensor):
        return x
    return distribute_tensor(
        x.to(other.device), other.device_mesh, other.placements, src_data_rank=None
    )


def average_unsharded_gradients(model: nn.Module) -> None:
    """Average the gradients that FSDP2 leaves alone, those of whole weights, over all processes."""
    if not isinstance(model, FSDPModule):
        return
    grads = [p.grad for p in model.parameters() if not isinstance(p, DTensor)]
    grads = [grad for grad in grads if grad is not None]
    if grads:
        sums = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(sums)
        means = (sums / dist.get_world_size()).split([grad.numel() for grad in grads])
        torch._foreach_copy_(grads, [m.view_as(g) for m, g in zip(means, grads, strict=True)])
