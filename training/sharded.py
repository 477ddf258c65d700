"""Tensors of which each process holds a part: the part, the whole, and back again."""

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
