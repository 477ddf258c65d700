"""Launch Hopper kernels with as little CPU time as possible.

Triton's own launcher encodes every descriptor and inspects every argument at each call, which takes
longer than a short kernel runs. Here a kernel is compiled once for known argument types, a
descriptor is encoded once per address and shape, and parameters are packed without inspection.
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


# ---- tensor maps for the copy engine (TMA)


def tile_map(x: Tensor, rows: int) -> tuple[bytes, Tensor]:
    """Tensor map of x for tiles of `rows`, and the tensor that it describes, to be kept alive.

    That is x, or rarely a copy: `kernels.hopper.unsupported_reason` refuses strides that are not
    multiples of 16 bytes. But torch.compile knows no addresses, and compiled code may change the
    strides of its arguments.

    Args:
        x: (B, T, H, D), D of stride 1 and a multiple of 8, 2 bytes per element. The dimensions of
            the map are (B, H, T, D).
    """
    tensor_map = _tensor_map(x.data_ptr(), x.dtype, x.shape, x.stride(), rows)
    if tensor_map is None:
        return tile_map(x.clone(memory_format=torch.contiguous_format), rows)
    return tensor_map, x


class TensorMaps:
    """Cache of `tile_map` for tensors of one shape and dtype."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._maps: dict[tuple[int, tuple[int, ...]], bytes] = {}

    def __call__(self, x: Tensor) -> tuple[bytes, Tensor]:
        key = x.data_ptr(), x.stride()
        tensor_map = self._maps.get(key)
        if tensor_map is not None:
            return tensor_map, x
        tensor_map, described = tile_map(x, self._rows)
        # The address of a copy says nothing about the next call.
        if described is x:
            if len(self._maps) >= _MAX_MAPS:
                self._maps.clear()
            self._maps[key] = tensor_map
        return tensor_map, described


_MAX_MAPS = 256


# Safe to cache: a map depends on its arguments only, even when memory is freed and used again.
@functools.lru_cache(maxsize=4096)
def _tensor_map(
    address: int, dtype: torch.dtype, shape: torch.Size, strides: tuple[int, ...], rows: int
) -> bytes | None:
    """Tensor map for tiles, or None if the copy engine cannot take the address or the strides."""
    if address % 16 or not describable(shape, strides):
        return None
    B, T, H, D = shape
    # A dimension of size 1 may have any stride. It is never used, but the driver checks it.
    b, t, h = (x if n > 1 else 8 for n, x in zip(shape[:3], strides[:3], strict=True))
    return driver.tensor_map(
        address, dtype, (B, H, T, D), (b, h, t, 1), (1, 1, rows, driver.BOX_COLUMNS)
    )


@functools.lru_cache(maxsize=4096)
def vector_map(address: int, size: int, box: int) -> bytes:
    """Tensor map of contiguous fp32 numbers, for copies of `box` of them."""
    return driver.tensor_map(address, torch.float32, (size,), (1,), (box,))


# ---- kernels


def tile_layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """Layout of a tile in shared memory, for wgmma and the copy engine."""
    shape = [1, 1, rows, columns]
    return gl.NVMMASharedLayout.get_default_for(shape, DTYPES[dtype])  # pyright: ignore


def tile_type(rows: int, columns: int, dtype: torch.dtype) -> str:
    """Triton type of a `tile_map`."""
    layout = tile_layout(rows, columns, dtype)
    return f"tensordesc<{DTYPES[dtype].name}{[1, 1, rows, columns]},{layout!r}>"


def vector_type(box: int) -> str:
    """Triton type of a `vector_map`."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    return f"tensordesc<fp32[{box}],{layout!r}>"


def pointer_type(dtype: torch.dtype) -> str:
    """Triton type of a pointer to numbers of this dtype."""
    return f"*{DTYPES[dtype].name}"


def compile_kernel(
    kernel: Any,
    types: Sequence[str | None],
    plan: Any,
    divisors: dict[int, int] | None = None,
    options: dict[str, Any] | None = None,
) -> Any:
    """Compile a kernel with Triton for an H100 or H200; needs no GPU.

    Args:
        kernel: in Gluon or Triton; its last parameter is the plan.
        types: of the parameters before the plan; None for an argument that is None.
        plan: `kernels.hopper.forward.plan.Plan`, or that of the backward pass.
        divisors: by position, a known divisor of a parameter; of a pointer, in bytes.
        options: of the compiler; by default those of the plan.
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


_CODES = {"u32": "i", "f32": "f", "u64": "q"}  # PTX types to codes of `struct`
_DESCRIPTOR = f"{driver.TENSOR_MAP_BYTES}s"


def parameter_layout(ptx: str) -> tuple[struct.Struct, list[int]]:
    """Memory layout of the parameters of a kernel, as its PTX declares them.

    Returns:
        (layout, offsets): `layout` packs the tensor map of each descriptor and a number for each
        other argument, in their order; `offsets` is where each parameter begins. Behind each
        descriptor Triton also passes a 32-bit size and a 64-bit stride for each dimension, which a
        kernel reads only if it asks for them, and at the end two pointers to scratch memory. All
        these stay 0.
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
        compiled.run  # noqa: B018  # the look-up loads the kernel
        self._compiled = compiled  # kept alive, as it unloads the kernel when it is deleted
        self._function = compiled.function
        self._threads = 32 * metadata.num_warps
        self._shared = metadata.shared
        self._layout, offsets = parameter_layout(compiled.asm["ptx"])
        self._parameters = driver.Parameters(self._layout.size, offsets)

    def launch(self, programs: int, stream: int, *parameters: bytes | int | float) -> None:
        """Launch on a stream of the current GPU; parameters as in `parameter_layout`."""
        self._layout.pack_into(self._parameters.memory, 0, *parameters)
        driver.launch_kernel(
            self._function, programs, self._threads, self._shared, stream, self._parameters
        )


@functools.cache
def kernel_on(device: int, compiler: Callable[..., Any], *arguments: Any) -> Kernel:
    """Compile a kernel by `compiler(*arguments)`, and load it on this GPU, the current one."""
    return Kernel(compiler(*arguments))


def current_stream(device: int) -> int:
    """Handle of PyTorch's current stream on the GPU of this index."""
    return torch._C._cuda_getCurrentRawStream(device)


@functools.cache
def n_multiprocessors(device: torch.device) -> int:
    """Number of SMs of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


class TileCounters:
    """Pairs of counters for `kernels.hopper.scheduler`, zero between launches.

    Launches on one stream run one after another, so they share a pair. Each captured launch has its
    own pair, because its graph may be replayed alongside anything but itself. No pair is handed out
    twice. A launch that fails halfway destroys the CUDA context, and these counters with it.
    """

    _CHUNK = 4096

    def __init__(self) -> None:
        self._of_stream: dict[tuple[int, int], Tensor] = {}
        self._chunks: list[Tensor] = []  # graphs know addresses in them
        self._unused: dict[int, list[Tensor]] = {}

    def pair(self, device: torch.device, stream: int) -> Tensor:
        """Counters, two int32 zeros on `device`, for the next launch on a stream (its handle)."""
        if torch.cuda.is_current_stream_capturing():
            unused = self._unused.get(device.index)
            # If none is left, the graph zeroes a pair of its own at each replay. That pair is in
            # the graph's memory pool, so nothing here may keep a reference to it.
            return unused.pop() if unused else torch.zeros(2, dtype=torch.int32, device=device)
        key = (device.index, stream)
        if key not in self._of_stream:
            self._of_stream[key] = self._take(device)
        return self._of_stream[key]

    def _take(self, device: torch.device) -> Tensor:
        unused = self._unused.setdefault(device.index, [])
        if not unused:
            # While torch.compile warms up a CUDA graph, tensors of this thread are allocated in the
            # graph's memory pool, and may not outlive the graph. Those of another thread are not.
            with ThreadPoolExecutor(1) as thread:
                self._chunks.append(thread.submit(_zeros, self._CHUNK, device).result())
            unused += self._chunks[-1].unbind()
        return unused.pop()


def _zeros(n: int, device: torch.device) -> Tensor:
    """Zeros for n pairs, each in a row of its own, ready for launches on any stream."""
    # Four numbers per row: 16 bytes, so that all pairs are aligned alike.
    chunk = torch.zeros(n, 4, dtype=torch.int32, device=device)
    torch.cuda.current_stream(device).synchronize()  # another stream may use them first
    return chunk


tile_counters = TileCounters()
