"""Launching a Hopper kernel with as little work on the CPU as can be.

Triton's own way looks at every argument of every call to find the compiled kernel, and checks its
descriptors, which takes longer than a short kernel runs. Here a kernel is compiled once for a key
that the caller knows, and from then on launched by its handle.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.hopper.tiles import Plan

DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


class Tiled(NamedTuple):
    """A (B, T, H, D) tensor as the copy engine is told of it, (B, H, T, D).

    A launch encodes it anew, which takes the CPU under a microsecond, and passes it by value: there
    is nothing to keep, and nothing that a freed tensor could leave behind.
    """

    base: Tensor
    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int, int]
    padding: str = "zero"
    round_f32_to_tf32: bool = False


def tiled(x: Tensor) -> Tiled:
    """x (B, T, H, D), D a multiple of 8 and of stride 1, of 2 bytes an element.

    Or a copy of x where it begins or strides between multiples of 16 bytes. That is seldom:
    `kernels.hopper.obstacle` refuses such strides. But it cannot look at addresses, which
    torch.compile does not know, and compiled code may lay out its tensors anew.
    """
    B, T, H, D = x.shape
    b, t, h, _ = x.stride()
    # the stride of a single element may be anything: nothing is read there
    b, t, h = b if B > 1 else 8, t if T > 1 else 8, h if H > 1 else 8
    if x.data_ptr() % 16 or b % 8 or t % 8 or h % 8 or min(b, t, h) <= 0:
        return tiled(x.clone(memory_format=torch.contiguous_format))
    return Tiled(x, (B, H, T, D), (b, h, t, 1))


def tile_layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """How a tile of a `Tiled` lies in shared memory, as wgmma and the copy engine want it."""
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, columns], DTYPES[dtype])


def compile_for(
    kernel: Any, tiles: list[tuple[Tiled, int, int]], arguments: tuple, plan: Plan
) -> Callable[..., None]:
    """A kernel compiled for the current GPU, whose last parameter is its plan.

    Args:
        tiles: of the arguments that come first, each with the rows and columns of a tile.
        arguments: those after them.

    Returns:
        The launch: number of programs, stream, and the arguments, the `Tiled` ones first.
    """
    descriptors = [
        TensorDescriptor(
            x.base, list(x.shape), list(x.strides), [1, 1, rows, columns],
            tile_layout(rows, columns, x.base.dtype),
        )
        for x, rows, columns in tiles
    ]  # fmt: skip
    compiled = kernel.warmup(*descriptors, *arguments, plan, grid=(1,), **plan.compiler_options)

    def launch(programs: int, stream: int, *arguments: Any) -> None:
        compiled[programs, 1, 1](*arguments, plan, stream=stream)

    return launch


@functools.cache
def n_multiprocessors(device: torch.device) -> int:
    """How many programs of one a multiprocessor run at a time."""
    return torch.cuda.get_device_properties(device).multi_processor_count


class TileCounters:
    """Pairs of counters for `kernels.hopper.schedule`, at zero between two launches.

    Launches of one stream follow each other, so they share a pair. A captured launch has one for
    itself, because its graph may be replayed beside anything but itself. No pair is ever used
    again. A launch that fails halfway takes the CUDA context with it, and these counters too.
    """

    _CHUNK = 4096

    def __init__(self) -> None:
        self._of_stream: dict[tuple[int, int], Tensor] = {}
        self._chunks: list[Tensor] = []
        self._unused: dict[int, list[Tensor]] = {}

    def pair(self, device: torch.device, stream: int) -> Tensor:
        """Two zeros, int32, on `device`: for the next launch on the stream of this handle."""
        if torch.cuda.is_current_stream_capturing():
            return self._take(device)
        key = (device.index, stream)
        if key not in self._of_stream:
            self._of_stream[key] = self._take(device)
        return self._of_stream[key]

    def _take(self, device: torch.device) -> Tensor:
        unused = self._unused.setdefault(device.index, [])
        if not unused:
            # four numbers each: 16 bytes, an alignment that all pairs share
            chunk = torch.zeros(self._CHUNK, 4, dtype=torch.int32, device=device)
            self._chunks.append(chunk)
            if torch.cuda.is_current_stream_capturing():
                return chunk[0]  # its graph sets it to zero at each replay
            torch.cuda.current_stream(device).synchronize()  # other streams may come first
            unused += chunk.unbind()
        return unused.pop()


tile_counters = TileCounters()
