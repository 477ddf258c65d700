"""Functions of whole matrices whose rows are sharded over processes, for Muon with FSDP2."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import pad


def apply_to_whole(function: Callable[[Tensor], Tensor], shards: Tensor, weight: Tensor) -> Tensor:
    """Apply a function to a batch of matrices, of which each process has some rows.

    Each process gets an equal number of the matrices, applies the function to them, and sends the
    rows of the results back. So each process exchanges as much as it stores, and computes a share
    of what one process would. Liu et al. 2025, "Muon is Scalable for LLM Training" (arXiv
    2502.16982), shard Muon in this way. All processes must call this together; none waits for its
    GPU.

    Args:
        function: maps a batch of matrices (B, M, N) in bfloat16 to one of the same shape and dtype.
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
    # The last shards of a matrix may have fewer rows, or none: all are sent with as many.
    n_rows = -(-weight.shape[0] // n_processes)
    n_each = -(-n_matrices // n_processes)
    missing = n_processes * n_each - n_matrices
    sent = shards.bfloat16()
    if missing or n_own < n_rows:
        sent = pad(sent, (0, 0, 0, n_rows - n_own, 0, missing))
    # Process r computes matrices r * n_each to (r + 1) * n_each - 1: adjacent, so the batch is sent
    # without a copy. What arrives are the rows of its matrices, by sender.
    rows = _exchange(sent, group).view(n_processes, n_each, n_rows, columns)
    whole = rows.transpose(0, 1).reshape(n_each, n_processes * n_rows, columns)
    results = function(whole[:, : weight.shape[0]])
    if cut := n_processes * n_rows - weight.shape[0]:
        results = pad(results, (0, 0, 0, cut))
    rows = results.view(n_each, n_processes, n_rows, columns).transpose(0, 1)
    return _exchange(rows.reshape(sent.shape), group)[:n_matrices, :n_own]


def batch_size(weight: Tensor, most: int) -> int:
    """Number of matrices for which `apply_to_whole` keeps all processes busy.

    Args:
        weight: one of the matrices.
        most: numbers in the share of a process; one that a process cannot divide may have more.
    """
    n_processes = weight.device_mesh.size() if isinstance(weight, DTensor) else 1
    return n_processes * max(1, most // weight.numel())


def _exchange(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send the i-th part of x to process i of the group, and return what all sent, by process."""
    x = x.contiguous()
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=group)
    return received
