"""The functions of the CUDA driver that a launch needs, called through ctypes."""

import ctypes
import functools
import threading
from typing import Any

import torch

TENSOR_MAP_BYTES = 128
BOX_COLUMNS = 64  # elements of a row in one copy: a line of 128 bytes, swizzled

# Values from cuda.h
_SUCCESS, _INVALID_CONTEXT = 0, 201
_DATA_TYPES = {torch.float16: 6, torch.bfloat16: 9, torch.float32: 7}
_NO_INTERLEAVE, _NO_SWIZZLE, _SWIZZLE_128B = 0, 0, 3
_PROMOTION_L2_128B, _FILL_WITH_ZERO = 2, 0

_pointer, _uint = ctypes.c_void_p, ctypes.c_uint


@functools.cache
def _libcuda() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    library.cuLaunchKernel.argtypes = [_pointer, *[_uint] * 7, *[_pointer] * 3]
    map_types = [_pointer, *[_uint] * 2, *[_pointer] * 5, *[_uint] * 4]
    library.cuTensorMapEncodeTiled.argtypes = map_types
    library.cuCtxSetCurrent.argtypes = [_pointer]
    return library


def _call(function: str, *arguments: Any) -> None:
    """Call a function of the driver in the context of the current GPU."""
    status = getattr(_libcuda(), function)(*arguments)
    if status == _INVALID_CONTEXT:
        # If its tensors came from PyTorch's cache, this thread may never have called CUDA: give it
        # the primary context.
        context, device = _pointer(), torch.cuda.current_device()
        retained = _libcuda().cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        _raise_on(retained, "cuDevicePrimaryCtxRetain")
        _raise_on(_libcuda().cuCtxSetCurrent(context), "cuCtxSetCurrent")
        status = getattr(_libcuda(), function)(*arguments)
    _raise_on(status, function)


def _raise_on(status: int, function: str) -> None:
    if status != _SUCCESS:
        name = ctypes.c_char_p()
        _libcuda().cuGetErrorName(status, ctypes.byref(name))
        raise RuntimeError(f"{function} failed: {(name.value or b'unknown error').decode()}")


def tensor_map(
    address: int, dtype: torch.dtype,
    shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...],
) -> bytes:  # fmt: skip
    """Encode the `CUtensorMap` for copies of boxes between a tensor and shared memory.

    Args:
        address: of the first element, a multiple of 16.
        dtype: bf16, fp16 or fp32.
        shape, strides: in elements; the last stride is 1, the others are multiples of 8.
        box: shape of one copy; with several dimensions, the last one is a line of 128 bytes.
            Outside of the tensor a copy reads 0 and writes nothing.

    Raises:
        RuntimeError: the call of the driver fails.
    """
    rank = len(shape)
    # CUDA lists the innermost dimension first, and takes no stride for it, as it must be 1.
    sizes = (ctypes.c_uint64 * rank)(*reversed(shape))
    pitches = (ctypes.c_uint64 * rank)(*(dtype.itemsize * x for x in reversed(strides[:-1])))
    extents = (_uint * rank)(*reversed(box))
    steps = (_uint * rank)(*[1] * rank)
    # The driver requires a map to begin at a multiple of 64 bytes, which ctypes does not ensure.
    memory = ctypes.create_string_buffer(TENSOR_MAP_BYTES + 64)
    start = -ctypes.addressof(memory) % 64
    swizzle = _NO_SWIZZLE if rank == 1 else _SWIZZLE_128B
    _call(
        "cuTensorMapEncodeTiled",
        ctypes.addressof(memory) + start, _DATA_TYPES[dtype], rank, address,
        sizes, pitches, extents, steps,
        _NO_INTERLEAVE, swizzle, _PROMOTION_L2_128B, _FILL_WITH_ZERO,
    )  # fmt: skip
    return memory.raw[start : start + TENSOR_MAP_BYTES]


class Parameters(threading.local):
    """Memory for the parameters of a launch. Each thread has its own, as several may launch."""

    def __init__(self, size: int, offsets: list[int]) -> None:
        self.memory = ctypes.create_string_buffer(size)
        start = ctypes.addressof(self.memory)
        self.pointers = (_pointer * len(offsets))(*(start + offset for offset in offsets))


def launch_kernel(
    function: int, programs: int, threads: int, shared: int, stream: int, parameters: Parameters
) -> None:
    """Launch a kernel, given its handle, on a stream of the current GPU.

    Args:
        threads: per program; shared: bytes of shared memory per program.
        parameters: of the kernel, filled in. The driver copies them.
    """
    _call(
        "cuLaunchKernel",
        function, programs, 1, 1, threads, 1, 1, shared, stream, parameters.pointers, None,
    )  # fmt: skip
