"""Tensors of which each process holds a part, beside others that each has whole."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


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


def average(tensors: Sequence[Tensor]) -> None:
    """Make each of these the mean of those of all processes, in place, all in one exchange."""
    sums = torch.cat([x.flatten() for x in tensors])
    dist.all_reduce(sums)
    means = (sums / dist.get_world_size()).split([x.numel() for x in tensors])
    torch._foreach_copy_(list(tensors), [m.view_as(x) for m, x in zip(means, tensors, strict=True)])
