"""GEMM for Hopper (H100, H200) in Gluon, with an epilogue: bias, GELU or its gradient.

One persistent program runs on each SM and computes every n-th tile of the result, where n is the
number of programs. Its producer warp loads the factors with the copy engine into a ring of stages.
Two groups of four warps alternate (CUTLASS's ping-pong schedule): one multiplies while the other
runs the epilogue of its tile. So the epilogue takes no tensor core time and no pass over memory.

Letters: M rows and N columns of a tile of the result, K columns of a factor in a stage.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ..gluon import tma_load
from ..launch import (
    compile_kernel,
    current_stream,
    kernel_on,
    n_multiprocessors,
    tile_map,
    tile_type,
)
from ..pipeline import arrive, make_full_and_empty, wait_empty, wait_full
from .epilogue import HALVES, Epilogue, gelu_epilogue, gelu_gradient_epilogue, load_h

ROWS, COLUMNS, DEPTH = 128, 128, 64  # of a tile, and of a stage
M, N, K = gl.constexpr(ROWS), gl.constexpr(COLUMNS), gl.constexpr(DEPTH)
HALF = gl.constexpr(COLUMNS // 2)
STAGES = gl.constexpr(5)


@dataclass(frozen=True)
class GemmPlan:
    """One compilation of the kernel; without `gradient`, `stores_g` and `bias` are always on."""

    transposed: bool  # whether b is (columns of the result, depth), not (depth, columns)
    gradient: bool  # whether the product is the gradient of a GELU, rather than its input
    stores_g: bool = True  # whether the GELU is stored
    bias: bool = True  # whether a bias is added before the GELU, and has a gradient

    @property
    def compiler_options(self) -> dict[str, Any]:
        """Options of Triton's compiler."""
        return {"num_warps": 4, "maxnreg": 168, "enable_fp_fusion": True}


class Ring(NamedTuple):
    """Ring of the factors, with its barriers."""

    a: gl.shared_memory_descriptor  # (STAGES, 1, 1, M, K)
    b: gl.shared_memory_descriptor  # (STAGES, 1, 1, N, K) or (STAGES, 1, 1, K, N)
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


class Tiles(NamedTuple):
    """Tiling of the result."""

    down: gl.tensor
    across: gl.tensor
    steps: gl.tensor  # stages of the factors for one tile


@gluon.jit
def _n_tiles(tiles):
    """Number of tiles of this program."""
    # All tiles cost the same, so a static schedule is balanced without a counter.
    return gl.cdiv(tiles.down * tiles.across - gl.program_id(0), gl.num_programs(0))


@gluon.jit
def _place(i, tiles):
    """First row and column of the i-th tile of this program."""
    # Tiles are numbered along rows: programs that run together share rows of a in the L2 cache.
    tile = gl.program_id(0) + i * gl.num_programs(0)
    return tile // tiles.across * M, tile % tiles.across * N


@gluon.jit
def _produce(a, b, ring, tiles, plan: gl.constexpr):
    """Body of the producer: load the factors of one tile after the other."""
    # c counts stages of all tiles, so the factors of the next tile are on their way while the last
    # stages of this one are multiplied.
    c = 0
    for i in range(_n_tiles(tiles)):
        m, n = _place(i, tiles)
        for step in range(tiles.steps):
            stage = c % STAGES
            full = ring.full.index(stage)
            # Only the group that multiplies this tile reads a stage, so it alone empties it.
            wait_empty(ring.empty, c)
            # `full` flips when both copies have arrived; the producer does not wait for them.
            mbarrier.expect(full, a.block_type.nbytes + b.block_type.nbytes)
            tma_load(a, [0, 0, m, step * K], full, ring.a.index(stage))
            b_at = [0, 0, n, step * K] if plan.transposed else [0, 0, step * K, n]
            tma_load(b, b_at, full, ring.b.index(stage))
            c += 1


@gluon.jit
def _multiply(c, ring, tiles, plan: gl.constexpr, L: gl.constexpr):
    """Product of a tile, (M, N) fp32 in layout L, with its last step in flight.

    c is the stage of the first step.
    """
    acc = gl.zeros([M, N], gl.float32, layout=L)
    for step in range(tiles.steps):
        stage = c % STAGES
        wait_full(ring.full, c)
        a = ring.a.index(stage).reshape([M, K])
        if plan.transposed:
            b = ring.b.index(stage).reshape([N, K]).permute((1, 0))
        else:
            b = ring.b.index(stage).reshape([K, N])
        # Keep one product in flight, so that the tensor cores need not wait for this group. The one
        # before it is done, so the producer may refill its stage.
        acc = hopper.warpgroup_mma(a, b, acc, use_acc=step > 0, is_async=True)
        acc = hopper.warpgroup_mma_wait(1, deps=(acc,))
        arrive(ring.empty, c + STAGES - 1, pred=step > 0)
        c += 1
    return acc


@gluon.jit
def _consume(ring, mma_order, epilogue, tiles, group: gl.constexpr, plan: gl.constexpr):
    """Body of a group: every second tile of the program.

    `mma_order` (2, 1) are barriers by which the groups multiply alternately. Those of the stages
    would not do: their phase is one bit, so a group two rounds ahead of the other would take an old
    filling of a stage for its own.
    """
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    for i in range(group, _n_tiles(tiles), 2):
        j = i // 2
        m, n = _place(i, tiles)
        # Load h ahead of the product, so that it arrives while the tile is multiplied.
        if plan.gradient:
            load_h(m, n, epilogue, group)
        # Wait until the other group has issued its last product: its epilogue then runs under this
        # product. Hand over in the same way. Group 0 does not wait the first time.
        mbarrier.wait(mma_order.index(group), (j & 1) ^ (1 - group))
        acc = _multiply(i * tiles.steps, ring, tiles, plan, L)
        mbarrier.arrive(mma_order.index(1 - group), count=1)
        acc = hopper.warpgroup_mma_wait(0, deps=(acc,))
        arrive(ring.empty, i * tiles.steps + tiles.steps - 1)
        # The epilogue takes one half of the columns at a time, which needs half of the registers.
        low, high = gl.split(acc.reshape([M, 2, HALF]).permute((0, 2, 1)))
        if plan.gradient:
            gelu_gradient_epilogue(low, high, m, n, epilogue, j, group)
        else:
            gelu_epilogue(low, high, m, n, epilogue, group)
    # Shared memory must outlive the last stores, which read it.
    tma.store_wait(0)


@gluon.jit
def gemm_kernel(
    a, b, h, g, dh, bias_ptr, sums_ptr, n_columns, down, across, steps, plan: gl.constexpr,
):  # fmt: skip
    B_ROWS: gl.constexpr = b.block_type.shape[2]
    B_COLUMNS: gl.constexpr = b.block_type.shape[3]
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    ring = Ring(
        gl.allocate_shared_memory(a.dtype, [STAGES, 1, 1, M, K], a.layout),
        gl.allocate_shared_memory(b.dtype, [STAGES, 1, 1, B_ROWS, B_COLUMNS], b.layout),
        *make_full_and_empty(STAGES, 1),
    )
    buffers = gl.allocate_shared_memory(h.dtype, [2 * HALVES, 1, 1, M, HALF], h.layout)
    mma_order = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    # Without a gradient these barriers are not used, so they are not made.
    h_full = gl.allocate_shared_memory(gl.int64, [2, 1], barrier) if plan.gradient else mma_order
    for group in gl.static_range(2):
        mbarrier.init(mma_order.index(group), count=1)
        if plan.gradient:
            mbarrier.init(h_full.index(group), count=1)
    # The copy engine must see the barriers as they were initialized.
    hopper.fence_async_shared()
    epilogue = Epilogue(h, g, dh, bias_ptr, sums_ptr, n_columns, buffers, h_full)
    tiles = Tiles(down, across, steps)
    # A group holds a tile of 128 x 128 in fp32: 128 registers of each thread. The second group has
    # 232, the first what the others leave, the producer 40.
    gl.warp_specialize(
        [
            (_consume, (ring, mma_order, epilogue, tiles, 0, plan)),
            (_consume, (ring, mma_order, epilogue, tiles, 1, plan)),
            (_produce, (a, b, ring, tiles, plan)),
        ],
        [4, 1], [232, 40],
    )  # fmt: skip


# ---- the launch


def compile_gemm(plan: GemmPlan, dtype: torch.dtype) -> Any:
    """Compile the kernel for this plan and for factors of this dtype; needs no GPU."""
    half = tile_type(ROWS, COLUMNS // 2, dtype)
    types = [
        tile_type(ROWS, DEPTH, dtype),
        tile_type(COLUMNS, DEPTH, dtype) if plan.transposed else tile_type(DEPTH, COLUMNS, dtype),
        half,
        half if plan.stores_g else None,
        half if plan.gradient else None,
        "*fp32" if plan.bias else None,
        "*fp32" if plan.bias and plan.gradient else None,
        *["i32"] * 4,
    ]
    return compile_kernel(gemm_kernel, types, plan)


def launch_gemm(
    a: Tensor, b: Tensor, h: Tensor, g: Tensor | None, dh: Tensor | None, bias: Tensor | None,
    plan: GemmPlan,
) -> Tensor | None:  # fmt: skip
    """Launch the GEMM of a and b with the epilogue of the plan.

    Args:
        a: (rows, depth), b as the plan says: bf16 or fp16, depth and columns multiples of 8.
            Tensors whose strides the copy engine cannot take are copied.
        h, g, dh: (rows, columns) of the same dtype, as in `Epilogue`; those that are stored must be
            contiguous and begin at a multiple of 16 bytes.
        bias: (columns,), floating-point; None if the plan has no bias.

    Returns:
        Column sums of dh in parts, to be added up: (parts, columns) fp32. None unless the plan has
        a gradient and a bias.
    """
    (rows, depth), columns = a.shape, h.shape[1]
    down, across = -(-rows // ROWS), -(-columns // COLUMNS)
    # Bias and sums are padded to whole tiles, so that the kernel needs no bounds checks.
    width = across * COLUMNS
    sums = None
    if bias is not None:
        bias = bias.float() if width == columns else F.pad(bias.float(), (0, width - columns))
        if plan.gradient:
            sums = h.new_empty(down, width, dtype=torch.float32)
    a_map, a = _matrix_map(a, ROWS)
    b_map, b = _matrix_map(b, COLUMNS if plan.transposed else DEPTH)
    h_map, h = _matrix_map(h, ROWS)
    output_maps = [_matrix_map(x, ROWS)[0] for x in (g, dh) if x is not None]
    kernel_on(h.device.index, compile_gemm, plan, h.dtype).launch(
        min(n_multiprocessors(h.device), down * across),
        current_stream(h.device.index),
        a_map, b_map, h_map, *output_maps,
        *[x.data_ptr() for x in (bias, sums) if x is not None],
        width, down, across, -(-depth // DEPTH),
    )  # fmt: skip
    return None if sums is None else sums[:, :columns]


def _matrix_map(x: Tensor, rows: int) -> tuple[bytes, Tensor]:
    """Tensor map of a matrix, and the tensor that it describes: x or a copy, to be kept alive."""
    x = x if x.stride(1) == 1 else x.contiguous()
    return tile_map(x[None, :, None], rows)
