"""Epilogues of `kernels.hopper.gemm.gemm`: bias, GELU, and their gradients.

A tile is processed in two halves of columns. Each group has one buffer in shared memory for each
half, from which the copy engine stores results. A third buffer would save a wait, but would replace
a stage of the factors, which costs more (H100).
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ...fused.triton.gelu import CUBIC, TWICE
from ...triton.primitives import LOG2E
from ..gluon import exp2, reciprocal, round_to, tma_load, tma_store

HALVES = gl.constexpr(2)


class Epilogue(NamedTuple):
    """Arguments of an epilogue: descriptors of (rows, columns) matrices, and pointers."""

    h: gl.tensor  # product without the bias: stored forward, read backward
    g: gl.tensor  # GELU, or None if it is not stored
    dh: gl.tensor  # gradient of h, or None
    bias_ptr: gl.tensor  # (n_columns,) fp32, or None
    sums_ptr: gl.tensor  # (tiles down, n_columns) fp32: column sums of dh in each tile; or None
    n_columns: gl.tensor  # of all tiles together
    buffers: gl.shared_memory_descriptor  # (2 * HALVES, 1, 1, M, half of N)
    h_full: gl.shared_memory_descriptor  # one barrier per group: h has arrived in its buffers


@gluon.jit
def load_h(m, n, epilogue, group: gl.constexpr):
    """Start to load h of the tile at row m and column n, once the tile before has been stored."""
    HALF: gl.constexpr = epilogue.h.block_type.shape[3]
    full = epilogue.h_full.index(group)
    # h comes into the buffers from which the tile before leaves.
    tma.store_wait(0)
    mbarrier.expect(full, HALVES * epilogue.h.block_type.nbytes)
    for half in gl.static_range(HALVES):
        buffer = epilogue.buffers.index(group * HALVES + half)
        tma_load(epilogue.h, [0, 0, m, n + half * HALF], full, buffer)


@gluon.jit
def gelu_epilogue(low, high, m, n, epilogue, group: gl.constexpr):
    """Store the product, given as its low and high half, and the GELU of product plus bias."""
    HALF: gl.constexpr = low.shape[1]
    DTYPE: gl.constexpr = epilogue.h.dtype
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    # Apply the GELU to the rounded product, which is what the backward pass reads.
    low = round_to(gl.convert_layout(low, L), DTYPE)
    high = round_to(gl.convert_layout(high, L), DTYPE)
    first = epilogue.buffers.index(group * HALVES)
    second = epilogue.buffers.index(group * HALVES + 1)
    # The GELU of the tile before may still be leaving through these buffers.
    tma.store_wait(0)
    # Both halves of the product leave first: the copy engine reads them while the GELU of the low
    # half is computed.
    _put(epilogue.h, m, n, low, first)
    _put(epilogue.h, m, n + HALF, high, second)
    low = _gelu(low, n, epilogue, L)
    # All stores but the newest are done, so the first buffer is free.
    tma.store_wait(1)
    _put(epilogue.g, m, n, low, first)
    high = _gelu(high, n + HALF, epilogue, L)
    tma.store_wait(1)
    _put(epilogue.g, m, n + HALF, high, second)


@gluon.jit
def gelu_gradient_epilogue(low, high, m, n, epilogue, j, group: gl.constexpr):
    """Store the gradient of h, its column sums and the GELU, as far as the plan has them.

    The product, given as its halves, is the gradient of the GELU. The column sums are for the
    gradient of the bias. j counts tiles of the group.
    """
    M: gl.constexpr = low.shape[0]
    HALF: gl.constexpr = low.shape[1]
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    # `load_h` began this load before the tile was multiplied.
    mbarrier.wait(epilogue.h_full.index(group), j & 1)
    # One half after the other: to read both at once would spill registers.
    first = epilogue.buffers.index(group * HALVES)
    low_sums = _gelu_gradient_half(low, m, n, epilogue, first, L)
    second = epilogue.buffers.index(group * HALVES + 1)
    high_sums = _gelu_gradient_half(high, m, n + HALF, epilogue, second, L)
    if epilogue.sums_ptr is not None:
        columns = n + gl.arange(0, HALF, layout=gl.SliceLayout(0, L))
        sums = epilogue.sums_ptr + m // M * epilogue.n_columns + columns
        gl.store(sums, low_sums)
        gl.store(sums + HALF, high_sums)


@gluon.jit
def _gelu_gradient_half(dg, m, n, epilogue, buffer, L: gl.constexpr):
    """Store dh from row m and column n on, given dg, and h in the buffer; return column sums."""
    h = buffer.reshape([dg.shape[0], dg.shape[1]]).load(L)
    x = _with_bias(h, n, epilogue, L)
    s = _gate(x)
    g = x * s
    dx = gl.convert_layout(dg, L) * (s + (g - g * s) * (TWICE + x * x * (3.0 * CUBIC * TWICE)))
    g = round_to(g, epilogue.dh.dtype)
    # The gradient leaves first. The GELU is rounded before, so that it waits in fewer registers.
    _put(epilogue.dh, m, n, round_to(dx, epilogue.dh.dtype), buffer)
    sums = gl.sum(dx, 0)
    if epilogue.g is not None:
        tma.store_wait(0)
        _put(epilogue.g, m, n, g, buffer)
    return sums


@gluon.jit
def _gelu(h, n, epilogue, L: gl.constexpr):
    """GELU of h (M, N / 2) plus the bias, in the dtype of h."""
    x = _with_bias(h, n, epilogue, L)
    return round_to(x * _gate(x), h.dtype)


@gluon.jit
def _with_bias(h, n, epilogue, L: gl.constexpr):
    """h (M, N / 2) in fp32, plus the bias from column n on if there is one."""
    x = h.to(gl.float32)
    # Without bounds: the bias is padded to whole tiles, which keeps registers free.
    if epilogue.bias_ptr is not None:
        columns = n + gl.arange(0, h.shape[1], layout=gl.SliceLayout(0, L))
        x += gl.expand_dims(gl.load(epilogue.bias_ptr + columns), 0)
    return x


@gluon.jit
def _gate(x):
    """Factor of x in the GELU: `kernels.fused.triton.gelu.gate` in fewer instructions."""
    return reciprocal(1.0 + exp2(x * (-TWICE * LOG2E + x * x * (-TWICE * LOG2E * CUBIC))))


@gluon.jit
def _put(out, m, n, x, buffer):
    """Store x from row m and column n on, through a free buffer."""
    buffer.reshape([x.shape[0], x.shape[1]]).store(x)
    # Make what the threads wrote visible to the copy engine.
    fence_async_shared()
    tma_store(out, [0, 0, m, n], buffer)
