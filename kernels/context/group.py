"""`ContextGroup`: the processes that share a sequence, and the tokens that each of them holds.

For P processes, a sequence of T tokens is split into 2 P chunks. Rank r holds chunks r and
2 P - 1 - r, so that under a causal mask all ranks have the same work (Llama 3, arXiv 2407.21783,
section 3.3.2).
"""

import atexit
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class ContextGroup:
    """Processes that share each sequence (context parallelism). Immutable.

    Args:
        process_group: a group of torch.distributed; None for this process alone.

    Attributes:
        process_group: as given.
        size: P, the number of processes.
        rank: rank of this process in the group.
        name: key by which operators look up the group, as they take no objects.
        chunks: numbers of the two chunks, out of 2 P, that this process holds.

    Raises:
        ValueError: process_group is not a group, or this process is not in it.
    """

    def __init__(self, process_group: "ProcessGroup | None" = None) -> None:
        alone = process_group is None
        outside = not alone and process_group is dist.GroupMember.NON_GROUP_MEMBER
        if not (alone or outside or isinstance(process_group, dist.ProcessGroup)):
            raise ValueError(
                "process_group must be a group of torch.distributed or None, got "
                f"{type(process_group).__name__}: for a DeviceMesh, pass mesh.get_group()"
            )
        self.process_group: Final = process_group
        self.size: Final[int] = 1 if alone else dist.get_world_size(process_group)
        self.rank: Final[int] = 0 if alone else dist.get_rank(process_group)
        if self.rank < 0:
            raise ValueError(
                "process_group must include this process, and does not: pass the group that does"
            )
        self.name: Final[str] = "" if alone else process_group.group_name
        self.chunks: Final = (self.rank, 2 * self.size - 1 - self.rank)
        _BY_NAME[self.name] = self

    def __repr__(self) -> str:
        return f"ContextGroup(rank {self.rank} of {self.size}, {self.name!r})"

    def shard(self, x: Tensor, dim: int) -> Tensor:
        """Part of x that belongs to this process; x itself in a group of one.

        Args:
            x: (..., T, ...), whole sequences; T is its dimension `dim`.

        Returns:
            (..., T / P, ...): the tokens of this process's two chunks.

        Raises:
            ValueError: T is not a multiple of 2 P.
        """
        if self.size == 1:
            return x
        n_tokens = x.shape[dim]
        if n_tokens % (2 * self.size):
            raise ValueError(
                f"a sequence of {n_tokens} tokens cannot be split into 2 * {self.size} equal "
                f"chunks, 2 for each process: make its length a multiple of {2 * self.size}"
            )
        c = n_tokens // (2 * self.size)
        return torch.cat([x.narrow(dim, chunk * c, c) for chunk in self.chunks], dim)

    def positions(self, n_local: int, device: torch.device | str | None = None) -> Tensor:
        """Positions of this process's n_local = T / P tokens in the sequence: (n_local,) int64."""
        if self.size == 1:
            return torch.arange(n_local, device=device)
        c = chunk_tokens(n_local)
        return torch.cat([torch.arange(a * c, (a + 1) * c, device=device) for a in self.chunks])

    @torch.no_grad()
    def unshard(self, x: Tensor, dim: int) -> Tensor:
        """Gather whole sequences from all processes, to all processes; without a gradient.

        Args:
            x: (..., T / P, ...), of this process; T / P is its dimension `dim`.

        Returns:
            (..., T, ...), in the order of the sequence.
        """
        if self.size == 1:
            return x
        c = chunk_tokens(x.shape[dim])
        parts = x.new_empty((self.size, *x.shape))
        all_gather(parts, x.contiguous(), self)
        # Rank r holds chunk 2 P - 1 - r: second chunks are in reverse order of ranks.
        first, second = zip(*(part.split(c, dim) for part in parts), strict=True)
        return torch.cat([*first, *reversed(second)], dim)


_BY_NAME: dict[str, ContextGroup] = {}
atexit.register(_BY_NAME.clear)  # gloo aborts if its threads outlive the interpreter


def group_named(name: str) -> ContextGroup:
    """Most recently created `ContextGroup` with this name."""
    return _BY_NAME[name]


# PyTorch 2.13 renamed it, and warns about the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def all_gather(parts: Tensor, x: Tensor, group: ContextGroup) -> None:
    """Gather the x (...) of each rank, contiguous, into `parts` (P, ...)."""
    _all_gather(parts.view(-1), x.view(-1), group=group.process_group)


def chunk_tokens(n_local: int) -> int:
    """Number of tokens in a chunk, c, if a process holds n_local tokens."""
    if n_local % 2:
        raise ValueError(
            "a process must hold an even number of tokens, two chunks of a sequence, got "
            f"{n_local}: make the sequence length a multiple of twice the number of processes"
        )
    return n_local // 2
