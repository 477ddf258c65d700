"""Functions of whole matrices whose rows are sharded over processes, for Muon with FSDP2."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import pad


def apply_to_whole(function: Callable[[Tensor], Tensor], shards: Tensor, weight: Tensor) -> Tensor:
    """Apply a function to a batch of matrices, of which each process has some rows.

    Each process receives an equal number of whole matrices, applies the function to them, and sends
    the rows of the results back. Work and memory are those of one process, divided by the number of
    processes. Liu et al. 2025, "Muon is Scalable for LLM Training" (arXiv 2502.16982), shard Muon's
    state and gather matrices; torchtitan's DistributedMuon also gives each matrix to one process.

    All processes must call this together. Nothing here waits for the GPU, so a CUDA graph can
    capture it.

    Args:
        function: maps a batch of matrices (B, M, N) in bfloat16 to one of the same shape.
            Matrices of zeros may be added to the batch; their results are not used.
        shards: (B, m, N), the m of M rows that this process has; sent in bfloat16.
        weight: (M, N), sharded like each of these matrices. If it is not a DTensor, neither are
            they: the function is applied to `shards`.

    Returns:
        (B, m, N), the same rows of the results.
    """
    if not isinstance(weight, DTensor):
        return function(shards)
    assert weight.placements == (Shard(0),), weight.placements  # as by FSDP2 on a mesh of one axis
    group = weight.device_mesh.get_group()
    (n_matrices, n_own, columns), n_processes = shards.shape, dist.get_world_size(group)
    # FSDP2's last shards may have fewer rows, or none. Equal parts need no sizes on the CPU.
    n_rows = -(-weight.shape[0] // n_processes)
    n_each = -(-n_matrices // n_processes)
    missing = n_processes * n_each - n_matrices
    sent = shards.bfloat16()
    if missing or n_own < n_rows:
        sent = pad(sent, (0, 0, 0, n_rows - n_own, 0, missing))
    # Process r gets matrices r * n_each to (r + 1) * n_each - 1. Adjacent ones need no copy before
    # they are sent. The rows that arrive are sorted by sender, then by matrix.
    rows = _exchange(sent, group).view(n_processes, n_each, n_rows, columns)
    whole = rows.transpose(0, 1).reshape(n_each, n_processes * n_rows, columns)
    del rows, sent  # `function` needs memory
    results = function(whole[:, : weight.shape[0]])
    if cut := n_processes * n_rows - weight.shape[0]:
        results = pad(results, (0, 0, 0, cut))
    rows = results.view(n_each, n_processes, n_rows, columns).transpose(0, 1)
    return _exchange(rows.flatten(0, 1), group)[:n_matrices, :n_own]


def sum_over_shards(x: Tensor, weight: Tensor) -> Tensor:
    """Sum x over the processes that share `weight`, in place; x itself if none do."""
    if isinstance(weight, DTensor):
        dist.all_reduce(x, group=weight.device_mesh.get_group())
    return x


def batch_size(weight: Tensor, most: int) -> int:
    """Number of matrices for one call of `apply_to_whole`: equally many for each process.

    Args:
        weight: one of the matrices.
        most: maximum number of elements for each process; a process gets at least one matrix.
    """
    n_processes = weight.device_mesh.size() if isinstance(weight, DTensor) else 1
    return n_processes * max(1, most // weight.numel())


def _exchange(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send the i-th part of x to process i of the group, and return what all sent, by process."""
    x = x.contiguous()
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=group)
    return received
