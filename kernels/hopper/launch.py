"""Launching a Hopper kernel with as little work on the CPU as can be.

Triton's own launcher encodes every descriptor and looks at every argument at each call, which takes
longer than a short kernel runs. Here a kernel is compiled for types that are known beforehand, a
descriptor is encoded once for what it describes, and the parameters are packed as they are.
"""

import functools
import re
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from . import describable, driver

DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


# ---- tensors, as the copy engine is told of them


def described(x: Tensor, rows: int) -> tuple[bytes, Tensor]:
    """The tensor map of x for tiles of `rows`, and what it describes: x, or a copy, to be kept.

    A copy is rare: `kernels.hopper.unsupported_reason` refuses strides that are not multiples of 16
    bytes. But torch.compile knows no addresses, and compiled code may change the strides of what
    it passes.

    Args:
        x: (B, T, H, D), D of stride 1 and a multiple of 8, 2 bytes an element. The dimensions of
            the map are (B, H, T, D).
    """
    found = _tensor_map(x.data_ptr(), x.dtype, x.shape, x.stride(), rows)
    if found is None:
        return described(x.clone(memory_format=torch.contiguous_format), rows)
    return found, x


class TensorMaps:
    """`described` for tensors of one shape and dtype."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._known: dict[tuple[int, tuple[int, ...]], bytes] = {}

    def __call__(self, x: Tensor) -> tuple[bytes, Tensor]:
        key = x.data_ptr(), x.stride()
        found = self._known.get(key)
        if found is not None:
            return found, x
        found, copy = described(x, self._rows)
        if copy is x:
            if len(self._known) >= _MOST_MAPS:
                self._known.clear()
            self._known[key] = found
        return found, copy


_MOST_MAPS = 256


# What is kept depends on the arguments alone, however often memory is freed and used again.
@functools.lru_cache(maxsize=4096)
def _tensor_map(
    address: int, dtype: torch.dtype, shape: torch.Size, strides: tuple[int, ...], rows: int
) -> bytes | None:
    """None where the copy engine cannot go."""
    if address % 16 or not describable(shape, strides):
        return None
    B, T, H, D = shape
    # the stride of a single element may be anything: nothing is read there
    b, t, h = (x if n > 1 else 8 for n, x in zip(shape[:3], strides[:3], strict=True))
    return driver.tensor_map(
        address, dtype, (B, H, T, D), (b, h, t, 1), (1, 1, rows, driver.BOX_COLUMNS)
    )


@functools.lru_cache(maxsize=4096)
def described_numbers(address: int, size: int, box: int) -> bytes:
    """The tensor map of contiguous fp32 numbers, for copies of `box` of them in a row."""
    return driver.tensor_map(address, torch.float32, (size,), (1,), (box,))


# ---- kernels


def tile_layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """How a tile lies in shared memory, as wgmma and the copy engine want it."""
    shape = [1, 1, rows, columns]
    return gl.NVMMASharedLayout.get_default_for(shape, DTYPES[dtype])  # pyright: ignore


def tile_type(rows: int, columns: int, dtype: torch.dtype) -> str:
    """Triton's type of a descriptor of tiles."""
    layout = tile_layout(rows, columns, dtype)
    return f"tensordesc<{DTYPES[dtype].name}{[1, 1, rows, columns]},{layout!r}>"


def numbers_type(box: int) -> str:
    """Triton's type of a descriptor of `described_numbers`."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    return f"tensordesc<fp32[{box}],{layout!r}>"


def pointer_type(dtype: torch.dtype) -> str:
    """Triton's type of a pointer to numbers of this dtype."""
    return f"*{DTYPES[dtype].name}"


def compile_kernel(
    kernel: Any,
    types: Sequence[str | None],
    plan: Any,
    divisors: dict[int, int] | None = None,
    options: dict[str, Any] | None = None,
) -> Any:
    """What Triton compiles for an H100 or H200: this needs no GPU.

    Args:
        kernel: in Gluon or Triton; its last parameter is the plan.
        types: of the parameters before it; None where an argument is None.
        plan: `kernels.hopper.forward.plan.Plan`, or that of the backward pass.
        divisors: what a parameter is a multiple of, a pointer in bytes, where that is known.
        options: of the compiler; default those of the plan.
    """
    arguments = {(i,): None for i, kind in enumerate(types) if kind is None}
    signature = {
        name: kind or "constexpr"
        for name, kind in zip(kernel.arg_names, [*types, None], strict=True)
    }
    constants = arguments | {(len(types),): plan}
    known = {(i,): [["tt.divisibility", n]] for i, n in (divisors or {}).items()}
    source = GluonASTSource if kernel.is_gluon() else ASTSource
    return triton.compile(
        source(kernel, signature, constants, known),
        target=GPUTarget("cuda", 90, 32),
        options=plan.compiler_options if options is None else options,
    )


_CODES = {"u32": "i", "f32": "f", "u64": "q"}  # of types in PTX, as struct names them
_DESCRIPTOR = f"{driver.TENSOR_MAP_BYTES}s"


def parameter_layout(ptx: str) -> tuple[struct.Struct, list[int]]:
    """How to lay out the parameters of a kernel, as its PTX declares them.

    Returns:
        (layout, offsets): what packs them into memory, and where in it each parameter begins. It
        packs the tensor map of each descriptor and a number for each other argument, in their
        order. Behind a descriptor Triton also passes a size of 32 bits and a stride of 64 for each
        dimension, which a kernel reads only if it asks for them, and at the end two pointers to
        scratch memory: these stay 0.
    """
    entry = ptx[ptx.index(".entry") :]
    kinds = re.findall(r"\.param (?:\.align 64 )?\.(\w+)", entry[: entry.index(")")])
    layout, offsets, end, unread = "<", [], 0, 0
    for i, kind in enumerate(kinds):
        code, alignment = (_DESCRIPTOR, 64) if kind == "b8" else (_CODES[kind], 0)
        size = struct.calcsize(code)
        padding = -end % (alignment or size)
        offsets.append(end + padding)
        end += padding + size
        if unread > 0 or i >= len(kinds) - 2:
            code, unread = f"{size}x", unread - 1
        elif kind == "b8":
            rank = next(n for n, later in enumerate(kinds[i + 1 :]) if later != "u32")
            unread = 2 * rank
        layout += f"{padding}x{code}"
    return struct.Struct(layout), offsets


class Kernel:
    """A compiled kernel, loaded on the current GPU."""

    def __init__(self, compiled: Any) -> None:
        metadata = compiled.metadata
        assert metadata.global_scratch_size == metadata.profile_scratch_size == 0
        compiled.run  # noqa: B018  # this loads it
        self._compiled = compiled  # which unloads it in the end
        self._function = compiled.function
        self._threads = 32 * metadata.num_warps
        self._shared = metadata.shared
        self._layout, offsets = parameter_layout(compiled.asm["ptx"])
        self._parameters = driver.Parameters(self._layout.size, offsets)

    def launch(self, programs: int, stream: int, *parameters: bytes | int | float) -> None:
        """Launch it on a stream of the current GPU; parameters as in `parameter_layout`."""
        self._layout.pack_into(self._parameters.memory, 0, *parameters)
        driver.launch_kernel(
            self._function, programs, self._threads, self._shared, stream, self._parameters
        )


@functools.cache
def kernel_on(device: int, compiler: Callable[..., Any], *arguments: Any) -> Kernel:
    """Compile for these arguments by `compiler`, on this GPU, which must be the current one."""
    return Kernel(compiler(*arguments))


def current_stream(device: int) -> int:
    """Handle of PyTorch's current stream on the GPU of this index."""
    return torch._C._cuda_getCurrentRawStream(device)


@functools.cache
def n_multiprocessors(device: torch.device) -> int:
    """How many programs of one a multiprocessor run at a time."""
    return torch.cuda.get_device_properties(device).multi_processor_count


class TileCounters:
    """Pairs of counters for `kernels.hopper.scheduler`, at zero between two launches.

    Launches of one stream follow each other, so they share a pair. A captured launch has one for
    itself, because its graph may be replayed next to anything but itself. No pair is ever used
    again. A launch that fails halfway takes the CUDA context with it, and these counters too.
    """

    _CHUNK = 4096

    def __init__(self) -> None:
        self._of_stream: dict[tuple[int, int], Tensor] = {}
        self._chunks: list[Tensor] = []  # graphs know addresses in them
        self._unused: dict[int, list[Tensor]] = {}

    def pair(self, device: torch.device, stream: int) -> Tensor:
        """Two zeros, int32, on `device`: for the next launch on the stream of this handle."""
        if torch.cuda.is_current_stream_capturing():
            unused = self._unused.get(device.index)
            # Without one, the graph sets a pair of its own to zero at each replay. Its memory is
            # the graph's, so nothing here may hold on to it.
            return unused.pop() if unused else torch.zeros(2, dtype=torch.int32, device=device)
        key = (device.index, stream)
        if key not in self._of_stream:
            self._of_stream[key] = self._take(device)
        return self._of_stream[key]

    def _take(self, device: torch.device) -> Tensor:
        unused = self._unused.setdefault(device.index, [])
        if not unused:
            # While torch.compile warms up a CUDA graph, what this thread allocates goes to the
            # graph's memory pool, and may not outlive the graph. Another thread's does not.
            with ThreadPoolExecutor(1) as thread:
                self._chunks.append(thread.submit(_zeros, self._CHUNK, device).result())
            unused += self._chunks[-1].unbind()
        return unused.pop()


def _zeros(n: int, device: torch.device) -> Tensor:
    """n pairs of zeros that launches on any stream may use, each in a row of its own."""
    # four numbers each: 16 bytes, an alignment that all pairs share
    chunk = torch.zeros(n, 4, dtype=torch.int32, device=device)
    torch.cuda.current_stream(device).synchronize()  # other streams may come first
    return chunk


tile_counters = TileCounters()
