"""Tables of addresses: one launch of a kernel reads and writes tensors anywhere in memory."""

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

_DTYPES = {None: None, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def tensor_at(address, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Load the address of a tensor as a pointer to DTYPE, aligned to 16 bytes if `ALIGNED`."""
    # The compiler knows the alignment of arguments, but not that of an address from memory. Without
    # this hint it would not vectorise loads.
    pointer = tl.load(address).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


class AddressTable:
    """Addresses of tensors, on their device; copied again only if tensors have moved."""

    def __init__(self) -> None:
        self._addresses: tuple[int, ...] = ()
        self._table: Tensor | None = None
        self._captured: list[Tensor] = []

    def update(self, tensors: Iterable[Tensor | None], device: torch.device) -> Tensor:
        """Addresses of `tensors`, int64; 0 for None."""
        addresses = tuple(0 if x is None else x.data_ptr() for x in tensors)
        if self._table is None or addresses != self._addresses:
            self._addresses = addresses
            self._table = self.put(torch.tensor(addresses), device)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._captured.append(self._table)  # each replay reads it, even if tensors move later
        return self._table

    def put(self, table: Tensor, device: torch.device) -> Tensor:
        """Copy a table to the device, asynchronously and in a way that a CUDA graph can capture."""
        if device.type != "cuda":
            return table
        table = table.pin_memory()
        if torch.cuda.is_current_stream_capturing():
            self._captured.append(table)  # each replay copies it
        return table.to(device, non_blocking=True)


def are_aligned(tensors: Iterable[Tensor | None]) -> bool:
    """Whether 16 bytes divide the address of each tensor, as `tensor_at` may assume."""
    return all(x is None or x.data_ptr() % 16 == 0 for x in tensors)


def dtype_of(casts: Iterable[Tensor | None]) -> tl.dtype | None:
    """Common dtype of casts, half precision; None if there are none."""
    (dtype,) = {cast.dtype for cast in casts if cast is not None} or {None}
    return _DTYPES[dtype]
