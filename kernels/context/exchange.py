"""Each rank sends a tensor to the next one, and gets one from the rank before.

Between GPUs that reach each other's memory the driver copies it: no kernel waits for room beside
those that compute, nor takes any of theirs. What comes lies in an inbox, memory of this GPU that
the rank before can write to. All else is exchanged by a collective of torch.distributed: between
machines, on CPUs, and what is larger than an inbox may be.
"""

import os
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..limits import LARGEST_INBOX
from .group import ContextGroup

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

SWITCH = "PAPILIO_INBOXES"  # in the environment; 0 leaves all exchanges to torch.distributed
TIMEOUT_MS = 600_000  # for the other GPUs to come, as in torch.distributed

# Signals between two GPUs: "my inbox is free", "what I send is there".
_FREE, _THERE = 0, 1


class Exchange(Protocol):
    """On its way. What is launched on the GPU from now on runs beside it."""

    def wait(self) -> Tensor:
        """What comes; whatever is launched from now on follows the exchange."""
        ...


def post(group: ContextGroup, sent: Tensor, inbox: int) -> Exchange:
    """Send a tensor to the next rank, and take one of the same shape and dtype from the one before.

    All ranks post the same exchanges in the same order.

    Args:
        group: P > 1.
        sent: contiguous, not written to before `wait`.
        inbox: the number of the inbox. What has come there may be read, by what is launched on the
            current stream, until the next exchange with the same number is posted.

    Raises:
        RuntimeError: the first exchange of its size was to be captured in a CUDA graph.
    """
    if not sent.is_cuda or sent.nbytes > LARGEST_INBOX or not _reach_each_other(group, sent.device):
        return _Collective(group, sent)
    assert group.process_group is not None
    inboxes = _INBOXES.get(group.process_group)
    if inboxes is None:
        inboxes = _INBOXES[group.process_group] = _Inboxes(group, sent.device)
    return _Copy(inboxes, sent, inbox)


def inbox_bytes() -> int:
    """Memory that the inboxes of this process take: torch.cuda's statistics do not count it."""
    return sum(inboxes.n_bytes for inboxes in _INBOXES.values())


def close_inboxes() -> None:
    """Give their memory back. All ranks call this, when none has an exchange on its way.

    Nothing may read what has come by then, nor replay a CUDA graph that has an exchange in it.
    """
    for inboxes in _INBOXES.values():
        inboxes.close()


class _Collective:
    """By torch.distributed."""

    def __init__(self, group: ContextGroup, sent: Tensor) -> None:
        # Not by isend and irecv, for which PyTorch has the allocator wait for a stream: it cannot
        # while a step is captured in a CUDA graph.
        to_each, of_each = ([0] * group.size for _ in range(2))
        to_each[(group.rank + 1) % group.size] = of_each[group.rank - 1] = len(sent)
        self._sent, self._received = sent, torch.empty_like(sent)
        work = dist.all_to_all_single(
            self._received, sent, of_each, to_each, group=group.process_group, async_op=True
        )
        assert work is not None
        self._work = work

    def wait(self) -> Tensor:
        self._work.wait()
        return self._received


# ---- by the driver


class _Inbox(NamedTuple):
    """Bytes that the rank before writes to, and those of the next rank."""

    signals: Any
    own: Tensor  # (n,) uint8
    next: Tensor


class _Inboxes:
    """Those of this process in a group, and the stream on which its exchanges follow each other."""

    def __init__(self, group: ContextGroup, device: torch.device) -> None:
        self.before, self.next = (group.rank - 1) % group.size, (group.rank + 1) % group.size
        self.stream = torch.cuda.Stream(device, priority=-1)
        self._group, self._device = group, device
        self._by_number: dict[int, list[_Inbox]] = {}

    def of(self, number: int, n_bytes: int) -> _Inbox:
        """The smallest that holds so much. They stay, for CUDA graphs know where they are."""
        found = self._by_number.setdefault(number, [])
        large_enough = [inbox for inbox in found if len(inbox.own) >= n_bytes]
        if not large_enough:
            large_enough = [self._new(n_bytes)]
            found += large_enough
        return min(large_enough, key=lambda inbox: len(inbox.own))

    def close(self) -> None:
        """Of all ranks at the same time: each writes to the memory of the next."""
        torch.cuda.synchronize(self._device)
        _of_each(self._group, None)
        self._by_number.clear()

    @property
    def n_bytes(self) -> int:
        """Of all of them."""
        return sum(len(inbox.own) for found in self._by_number.values() for inbox in found)

    def _new(self, n_bytes: int) -> _Inbox:
        _not_captured()
        import torch.distributed._symmetric_memory as symmetric_memory  # of builds with CUDA

        assert self._group.process_group is not None
        own = symmetric_memory.empty(n_bytes, dtype=torch.uint8, device=self._device)
        # Its signals are being set to zero, behind whatever the GPU is at, and PyTorch 2.11 does
        # not wait: a signal of another GPU would be lost that comes before.
        torch.cuda.synchronize(self._device)
        try:
            signals = symmetric_memory.rendezvous(own, self._group.process_group)
        except RuntimeError as error:
            raise RuntimeError(
                "GPUs of one machine could not open each other's memory, which a container may "
                f"forbid: set {SWITCH}=0, and NCCL exchanges what ring attention sends"
            ) from error
        return _Inbox(signals, own, signals.get_buffer(self.next, (n_bytes,), torch.uint8))


class _Copy:
    """By the driver, to the inbox of the next rank."""

    def __init__(self, inboxes: _Inboxes, sent: Tensor, number: int) -> None:
        inbox = inboxes.of(number, sent.nbytes)
        signals, before, behind = inbox.signals, inboxes.before, inboxes.next
        stream = inboxes.stream
        stream.wait_stream(torch.cuda.current_stream())  # which has read what was there
        with torch.cuda.stream(stream):
            signals.put_signal(before, _FREE, TIMEOUT_MS)
            signals.wait_signal(behind, _FREE, TIMEOUT_MS)
            inbox.next[: sent.nbytes].copy_(sent.view(-1).view(torch.uint8))
            signals.put_signal(behind, _THERE, TIMEOUT_MS)
            signals.wait_signal(before, _THERE, TIMEOUT_MS)
            self._done = stream.record_event()
        self._sent = sent  # it is there until it has been read
        self._received = inbox.own[: sent.nbytes].view(sent.dtype).view(sent.shape)

    def wait(self) -> Tensor:
        torch.cuda.current_stream().wait_event(self._done)
        return self._received


_INBOXES: "dict[ProcessGroup, _Inboxes]" = {}
_REACH: "dict[ProcessGroup, bool]" = {}


def _reach_each_other(group: ContextGroup, device: torch.device) -> bool:
    """Whether each rank can write to the memory of the next one's GPU: all have one answer."""
    assert group.process_group is not None
    if group.process_group not in _REACH:
        _not_captured()
        ids = _of_each(group, str(torch.cuda.get_device_properties(device).uuid))
        seen = [
            str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())
        ]
        behind = ids[(group.rank + 1) % group.size]
        reaches = (
            os.environ.get(SWITCH) != "0"
            and behind in seen
            and torch.cuda.can_device_access_peer(device, seen.index(behind))
        )
        _REACH[group.process_group] = all(_of_each(group, reaches))
    return _REACH[group.process_group]


def _of_each(group: ContextGroup, value: Any) -> list[Any]:
    """The values of all ranks."""
    values = [None] * group.size
    dist.all_gather_object(values, value, group=group.process_group)
    return values


def _not_captured() -> None:
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "the first exchange of its size, in which GPUs tell each other where their memory is, "
            "cannot be captured in a CUDA graph: run the step once before it is captured"
        )
