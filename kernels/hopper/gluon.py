"""Gluon as the kernels of this folder use it: what its releases name differently, and a few PTX
instructions that it has no word for."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import _unwrap_if_constexpr, builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

# Triton 3.6 against later releases
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # of the warps of a role
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@builtin
def reinterpret(shared, dtype, shape, layout, _semantic=None):
    """Shared memory taken for that of another dtype, shape and layout."""
    dtype, layout = (_unwrap_if_constexpr(x) for x in (dtype, layout))
    return _semantic.memdesc_reinterpret(
        shared, dtype, [_unwrap_if_constexpr(x) for x in shape], layout
    )


@gluon.jit
def exp2(x):
    """2^x by the instruction alone: below -126 it is 0, where a library function goes on."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def reciprocal(x):
    """1 / x to a rounding, by the instruction alone: a division goes on where x is beyond 2^126."""
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def log2(x):
    """log2(x) by the instruction alone; that of 0 is -inf."""
    return gl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def round_to(x, dtype: gl.constexpr):
    """fp32 to bf16 or fp16, in pairs: a plain cast would be repacked where a loop carries it."""
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], gl.bfloat16, is_pure=True, pack=2
        )
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [x], gl.float16, is_pure=True, pack=2
        )


@gluon.jit
def named_barrier_sync(barrier):
    """Wait at a named barrier for 128 other threads, that sync or `named_barrier_arrive` there.

    Triton's own barriers have the lowest numbers: one for each role of a program, and one more.
    """
    _do("bar.sync $1, 256; mov.u32 $0, 0;", barrier)


@gluon.jit
def named_barrier_arrive(barrier):
    """Arrive at a named barrier, where 128 other threads sync, without waiting for them."""
    _do("bar.arrive $1, 256; mov.u32 $0, 0;", barrier)


@gluon.jit
def _do(PTX: gl.constexpr, x):
    gl.inline_asm_elementwise(PTX, "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def discard_lines(pointers):
    """Forget what lines of 128 bytes of memory hold: the L2 cache need not write them back."""
    gl.inline_asm_elementwise(
        "discard.global.L2 [$1], 128; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(gl.uint64, bitcast=True)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def opaque(x):
    """The int32 x, of which the compiler shall not know how it was made."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def first_lane(x):
    """The value that the first thread of a warp holds, in all of them."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;",
        "=r,r",
        [x],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
