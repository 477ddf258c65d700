"""Ring exchange: each rank sends a tensor to the next rank and receives one from the previous.

Between GPUs with peer access, the driver copies the tensor into a receive buffer: memory of this
GPU that the previous rank can write to. Such a copy needs no SM, so it never competes with kernels
that run at the same time. All other exchanges use a collective of torch.distributed: those between
machines, on CPUs, and of tensors above MAX_RECEIVE_BUFFER.
"""

import os
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..limits import MAX_RECEIVE_BUFFER
from .group import ContextGroup

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

SWITCH = "PAPILIO_RECEIVE_BUFFERS"  # environment variable; 0 uses collectives for all exchanges
TIMEOUT_MS = 600_000  # for the other GPUs to arrive, as in torch.distributed

# Channels of the signals between two GPUs: "my buffer may be overwritten", "my data has arrived".
_FREE, _ARRIVED = 0, 1


class Exchange(Protocol):
    """An exchange in flight. Kernels launched before `wait` run concurrently with it."""

    def wait(self) -> Tensor:
        """Return the received tensor. Kernels launched after this call run after the exchange."""
        ...


def post(group: ContextGroup, sent: Tensor, slot: int) -> Exchange:
    """Send a tensor to the next rank, and receive one of the same shape and dtype.

    All ranks post the same exchanges in the same order.

    Args:
        group: P > 1.
        sent: contiguous, not written to before `wait`.
        slot: number of the receive buffer. Kernels on the current stream may read the received
            tensor until the next exchange with the same slot is posted.

    Raises:
        RuntimeError: a CUDA graph was being captured at the first exchange of this size.
    """
    # All ranks must choose the same way, or they would wait for each other forever. Sizes are equal
    # on all ranks, and `_have_peer_access` gives the same answer to all.
    too_large = sent.nbytes > MAX_RECEIVE_BUFFER
    if not sent.is_cuda or too_large or not _have_peer_access(group, sent.device):
        return _Collective(group, sent)
    assert group.process_group is not None
    if group.process_group not in _BUFFERS:
        _BUFFERS[group.process_group] = _ReceiveBuffers(group, sent.device)
    return _PeerCopy(_BUFFERS[group.process_group], sent, slot)


def receive_buffer_bytes() -> int:
    """Total size of this process's receive buffers, which torch.cuda's statistics do not count."""
    slots = [slot for buffers in _BUFFERS.values() for slot in buffers.slots.values()]
    return sum(len(buffer.own) for slot in slots for buffer in slot)


def free_receive_buffers() -> None:
    """Free all receive buffers. All ranks call this, with no exchange in flight.

    After this call, no received tensor may be read, and no CUDA graph with an exchange replayed.
    """
    for buffers in _BUFFERS.values():
        buffers.free()


class _Collective:
    """Exchange through a collective of torch.distributed."""

    def __init__(self, group: ContextGroup, sent: Tensor) -> None:
        # An all-to-all, not isend and irecv: for those, PyTorch makes the allocator wait for a
        # stream, which is impossible during the capture of a CUDA graph.
        send_rows, receive_rows = [0] * group.size, [0] * group.size
        send_rows[(group.rank + 1) % group.size] = receive_rows[group.rank - 1] = len(sent)
        self._sent, self._received = sent, torch.empty_like(sent)
        work = dist.all_to_all_single(
            self._received, sent, receive_rows, send_rows,
            group=group.process_group, async_op=True,
        )  # fmt: skip
        assert work is not None
        self._work = work

    def wait(self) -> Tensor:
        self._work.wait()
        return self._received


# ---- copies between GPUs, by the driver


class _ReceiveBuffer(NamedTuple):
    signals: Any
    own: Tensor  # (n,) uint8: the previous rank writes here
    next: Tensor  # (n,) uint8: the buffer of the next rank


class _ReceiveBuffers:
    """Receive buffers of this process in a group, and the stream that orders its exchanges."""

    def __init__(self, group: ContextGroup, device: torch.device) -> None:
        self.previous, self.next = (group.rank - 1) % group.size, (group.rank + 1) % group.size
        # High priority: signals are small kernels, which should not queue behind those that
        # compute.
        self.stream = torch.cuda.Stream(device, priority=-1)
        self._group, self._device = group, device
        self.slots: dict[int, list[_ReceiveBuffer]] = {}

    def get(self, slot: int, n_bytes: int) -> _ReceiveBuffer:
        """Smallest buffer of the slot that holds n_bytes, allocated if there is none.

        Buffers are never replaced, because CUDA graphs hold their addresses.
        """
        buffers = self.slots.setdefault(slot, [])
        fitting = [buffer for buffer in buffers if len(buffer.own) >= n_bytes]
        if not fitting:
            fitting = [self._allocate(n_bytes)]
            buffers += fitting
        return min(fitting, key=lambda buffer: len(buffer.own))

    def free(self) -> None:
        """Free the buffers, on all ranks at the same time: each writes to memory of the next."""
        torch.cuda.synchronize(self._device)
        _gather(self._group, None)
        self.slots.clear()

    def _allocate(self, n_bytes: int) -> _ReceiveBuffer:
        _refuse_capture()
        import torch.distributed._symmetric_memory as symmetric_memory  # in CUDA builds only

        assert self._group.process_group is not None
        own = symmetric_memory.empty(n_bytes, dtype=torch.uint8, device=self._device)
        # The GPU sets the signals of this buffer to zero in stream order, and PyTorch 2.11 does not
        # wait for that. A signal that another GPU sends earlier would be lost.
        torch.cuda.synchronize(self._device)
        try:
            signals = symmetric_memory.rendezvous(own, self._group.process_group)
        except RuntimeError as error:
            raise RuntimeError(
                "GPUs of one machine could not open each other's memory, which a container may "
                f"forbid: set {SWITCH}=0 to use NCCL for the exchanges of ring attention"
            ) from error
        return _ReceiveBuffer(signals, own, signals.get_buffer(self.next, (n_bytes,), torch.uint8))


class _PeerCopy:
    """Exchange through a copy into the receive buffer of the next rank."""

    def __init__(self, buffers: _ReceiveBuffers, sent: Tensor, slot: int) -> None:
        buffer, stream = buffers.get(slot, sent.nbytes), buffers.stream
        signals, previous, next_rank = buffer.signals, buffers.previous, buffers.next
        # The current stream has written `sent`, and has read the previous contents of this buffer:
        # wait for both before the copy starts and the buffer is declared free.
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # Signal the previous rank that this buffer is free; wait until that of the next rank
            # is. All ranks signal before they wait: in the other order, the ring would deadlock.
            signals.put_signal(previous, _FREE, TIMEOUT_MS)
            signals.wait_signal(next_rank, _FREE, TIMEOUT_MS)
            buffer.next[: sent.nbytes].copy_(sent.view(-1).view(torch.uint8))
            # Signal the next rank that its data has arrived; wait for our own.
            signals.put_signal(next_rank, _ARRIVED, TIMEOUT_MS)
            signals.wait_signal(previous, _ARRIVED, TIMEOUT_MS)
            self._done = stream.record_event()
        self._sent = sent  # keep its memory until the copy is done
        self._received = buffer.own[: sent.nbytes].view(sent.dtype).view(sent.shape)

    def wait(self) -> Tensor:
        torch.cuda.current_stream().wait_event(self._done)
        return self._received


_BUFFERS: "dict[ProcessGroup, _ReceiveBuffers]" = {}
_PEER_ACCESS: "dict[ProcessGroup, bool]" = {}


def _have_peer_access(group: ContextGroup, device: torch.device) -> bool:
    """Whether every rank can write to the memory of the next rank's GPU; the same on all ranks."""
    assert group.process_group is not None
    if group.process_group not in _PEER_ACCESS:
        _refuse_capture()

        def uuid(gpu: torch.device | int) -> str:
            return str(torch.cuda.get_device_properties(gpu).uuid)

        # Compare GPUs by UUID: processes may number them differently (CUDA_VISIBLE_DEVICES).
        next_uuid = _gather(group, uuid(device))[(group.rank + 1) % group.size]
        visible = [uuid(i) for i in range(torch.cuda.device_count())]
        can_write = (
            os.environ.get(SWITCH) != "0"
            and next_uuid in visible
            and torch.cuda.can_device_access_peer(device, visible.index(next_uuid))
        )
        _PEER_ACCESS[group.process_group] = all(_gather(group, can_write))
    return _PEER_ACCESS[group.process_group]


def _gather(group: ContextGroup, value: Any) -> list[Any]:
    """Gather the values of all ranks."""
    values = [None] * group.size
    dist.all_gather_object(values, value, group=group.process_group)
    return values


def _refuse_capture() -> None:
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "the first exchange of a size, in which GPUs open each other's memory, cannot be "
            "captured in a CUDA graph: run the step once before it is captured"
        )
