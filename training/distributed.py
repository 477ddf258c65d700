"""Processes of a run (one, or those that torchrun started) and tensors sharded over them."""

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

_left_groups: list[dist.ProcessGroup | None] = []
"""Gloo groups that were left, so that DDP does not destroy them; see `Processes.leave`."""


@dataclass(frozen=True, kw_only=True)
class Processes:
    """Rank, device and process groups of this process."""

    rank: int
    world_size: int
    device: torch.device
    host_group: dist.ProcessGroup | None = None
    """Gloo group of all processes, for communication on the CPU; None for a single process."""
    mesh: DeviceMesh | None = None
    """(data, context) mesh: processes of one row share each sequence. None without context
    parallelism."""

    @property
    def n_context(self) -> int:
        """Number of processes that share each sequence."""
        return 1 if self.mesh is None else self.mesh.size(1)

    @property
    def n_data(self) -> int:
        """Number of groups of processes that read different sequences."""
        return self.world_size // self.n_context

    @property
    def data_rank(self) -> int:
        """Index of this process's group among the `n_data` groups."""
        return self.rank // self.n_context

    @property
    def is_main(self) -> bool:
        """Whether this is the process that prints and writes files: rank 0."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """Whether this is the first process on its machine; the others share its disks."""
        return os.environ.get("LOCAL_RANK", "0") == "0"

    def __str__(self) -> str:
        """Number of processes and their device, as in "8 x NVIDIA H100 80GB HBM3"."""
        if self.device.type == "cuda":
            device = torch.cuda.get_device_name(self.device)
        else:
            device = f"CPU, {torch.get_num_threads()} threads"
        return f"{self.world_size} x {device}"

    def memory_gib(self) -> float | None:
        """Peak memory of this GPU's tensors so far, GiB; None on a CPU."""
        if self.device.type == "cpu":
            return None
        return (torch.cuda.max_memory_allocated(self.device) + receive_buffer_bytes()) / 2**30

    def sum(self, values: Tensor) -> Tensor:
        """Sum `values` over all processes, in place; a no-op for one process."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def max(self, values: Tensor) -> Tensor:
        """Maximum of `values` over all processes, in place; a no-op for one process."""
        if self.world_size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values

    def agree(self, value: T) -> T:
        """Broadcast the main process's `value`, which must be picklable, to every process."""
        if self.world_size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values)
        return values[0]

    def run_on_main(self, work: Callable[[], T]) -> T:
        """Run `work` on the main process; every process gets its result, or its error.

        Raises:
            ValueError, OSError: as raised by `work`. If only the main process raised it, the others
                would wait forever.
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
        """Gather the values of all processes, by rank, on the main process; None on the others."""
        if self.world_size == 1:
            return [value]
        values: list[Any] | None = [None] * self.world_size if self.is_main else None
        dist.gather_object(value, values, group=self.host_group)
        return values

    def leave(self) -> None:
        """Leave the process group, on all processes: no communication is possible afterwards."""
        if dist.is_initialized():
            # Destroying a Gloo group joins its threads. DDP would do so while it holds the GIL, and
            # a thread that still has to free a tensor needs the GIL: a deadlock.
            if dist.get_backend() == "gloo":
                _left_groups.append(dist.group.WORLD)
            dist.destroy_process_group()

    def barrier(self) -> None:
        """Wait until every process has called this."""
        if self.world_size > 1:
            dist.barrier()


@contextmanager
def start_processes(
    device: Literal["auto", "cuda", "cpu"], *, context: int = 1
) -> Iterator[Processes]:
    """Join the process group that torchrun's environment describes, and leave it at the end.

    Args:
        device: where to compute.
        context: number of processes, of consecutive ranks, that share each sequence.

    Raises:
        ValueError: a GPU was requested and there is none; there are fewer GPUs than processes on
            this machine; or the number of processes is not a multiple of `context`.
    """
    rank = int(os.environ.get("RANK", "0"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    n_gpu = torch.cuda.device_count()
    if device == "cuda" and n_gpu == 0:
        raise ValueError(
            "run.device=cuda needs a GPU, and PyTorch sees none. Try run.device=cpu, or check the "
            "driver (nvidia-smi) and that torch is a CUDA build (torch.version.cuda)"
        )
    if device == "cpu" or n_gpu == 0:
        own_device = torch.device("cpu")
    elif local_rank >= n_gpu:
        raise ValueError(
            f"torchrun started a process with local rank {local_rank}, but this machine has "
            f"{n_gpu} GPU(s). Try --nproc_per_node={n_gpu} or fewer"
        )
    else:
        own_device = torch.device("cuda", local_rank)
        torch.cuda.set_device(own_device)

    if world_size % context:
        raise ValueError(
            f"parallel.context={context} must divide the number of processes, {world_size}. Start "
            f"a multiple of {context} processes with torchrun"
        )
    if world_size > 1:
        if own_device.type == "cuda":
            # Otherwise communication waits while other kernels fill the GPU.
            os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
            dist.init_process_group("nccl", device_id=own_device)
        else:
            dist.init_process_group("gloo")
        if "TORCHELASTIC_RUN_ID" in os.environ:
            Thread(target=_exit_with_parent, args=(os.getppid(),), daemon=True).start()
    host_group = cast(Any, dist.new_group(backend="gloo")) if world_size > 1 else None
    mesh = None
    if context > 1:
        shape = world_size // context, context
        mesh = init_device_mesh(own_device.type, shape, mesh_dim_names=("data", "context"))
    processes = Processes(
        rank=rank, world_size=world_size, device=own_device, host_group=host_group, mesh=mesh
    )
    yield processes
    # Skipped after an error: NCCL would wait here for the others, and the error would stay hidden.
    processes.leave()


def _exit_with_parent(parent_pid: int) -> None:
    """Send SIGTERM to this process once torchrun has died, since torchrun can no longer do it."""
    while os.getppid() == parent_pid:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)


def local_tensor(x: Tensor) -> Tensor:
    """This process's shard of a DTensor, sharing its memory; x itself if it is not sharded."""
    return x.to_local() if isinstance(x, DTensor) else x


def full_tensor(x: Tensor) -> Tensor:
    """Unsharded tensor, on its device. For a DTensor, all processes must call this together."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def shard_like(x: Tensor, other: Tensor) -> Tensor:
    """Shard x, which every process holds in full, as `other` is sharded."""
    if not isinstance(other, DTensor):
        return x
    return distribute_tensor(
        x.to(other.device), other.device_mesh, other.placements, src_data_rank=None
    )


def average_unsharded_gradients(model: nn.Module) -> None:
    """Average over all processes the gradients of unsharded weights, which FSDP2 ignores."""
    if not isinstance(model, FSDPModule):
        return
    grads = [p.grad for p in model.parameters() if not isinstance(p, DTensor)]
    grads = [grad for grad in grads if grad is not None]
    if grads:
        sums = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(sums)
        means = (sums / dist.get_world_size()).split([grad.numel() for grad in grads])
        torch._foreach_copy_(grads, [m.view_as(g) for m, g in zip(means, grads, strict=True)])
