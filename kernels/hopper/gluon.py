"""Gluon helpers: names that differ between releases of Triton, and PTX instructions it lacks."""

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
    """View shared memory with another dtype, shape and layout."""
    dtype, layout = (_unwrap_if_constexpr(x) for x in (dtype, layout))
    shape = [_unwrap_if_constexpr(x) for x in shape]
    return _semantic.memdesc_reinterpret(shared, dtype, shape, layout)


@builtin
def join(first, second, _semantic=None):
    """Concatenate lists of roles; with + their arguments would no longer be constexprs."""
    return (*first, *second)


@gluon.jit
def _unary(PTX: gl.constexpr, x):
    return gl.inline_asm_elementwise(PTX, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def exp2(x):
    """2^x in one instruction; results below 2^-126 are flushed to 0."""
    return _unary("ex2.approx.ftz.f32 $0, $1;", x)


@gluon.jit
def reciprocal(x):
    """1 / x in one instruction, accurate to one rounding; 0 if x exceeds 2^126."""
    return _unary("rcp.approx.ftz.f32 $0, $1;", x)


@gluon.jit
def log2(x):
    """log2(x) in one instruction; log2(0) is -inf."""
    return _unary("lg2.approx.ftz.f32 $0, $1;", x)


@gluon.jit
def round_to(x, dtype: gl.constexpr):
    """Round fp32 to bf16 or fp16, two numbers per instruction.

    If a loop carries the result of a plain cast, Triton repacks it in every step.
    """
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], gl.bfloat16, is_pure=True, pack=2
        )
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [x], gl.float16, is_pure=True, pack=2
        )


@gluon.jit
def _on_int32(PTX: gl.constexpr, x, PURE: gl.constexpr):
    return gl.inline_asm_elementwise(PTX, "=r,r", [x], dtype=gl.int32, is_pure=PURE, pack=1)


@gluon.jit
def named_barrier_sync(barrier):
    """Wait at a named barrier until 128 other threads sync or `named_barrier_arrive` there.

    Triton itself uses the lowest numbers: one for each role of a program, and one more.
    """
    # 256 threads: the four warps of this group and the four of another.
    _on_int32("bar.sync $1, 256; mov.u32 $0, 0;", barrier, False)


@gluon.jit
def named_barrier_arrive(barrier):
    """Arrive at a named barrier where 128 other threads sync, without waiting for them."""
    _on_int32("bar.arrive $1, 256; mov.u32 $0, 0;", barrier, False)


@gluon.jit
def discard_lines(pointers):
    """Discard 128-byte lines of global memory: the L2 cache need not write them back."""
    address = pointers.to(gl.uint64, bitcast=True)
    # Not pure: nothing uses the result, and the compiler would drop a pure instruction.
    PTX: gl.constexpr = "discard.global.L2 [$1], 128; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(PTX, "=r,l", [address], gl.int32, is_pure=False, pack=1)


@gluon.jit
def opaque(x):
    """Hide from the compiler how the int32 x was computed."""
    return _on_int32("mov.b32 $0, $1;", x, True)


@gluon.jit
def zero_of(x):
    """Zero, hidden from LLVM: what depends on it is not computed before the int32 x."""
    return _on_int32("and.b32 $0, $1, 0;", x, True)


LANE = gl.constexpr(6)  # of a column number, the bits that depend on the thread


@gluon.jit
def split_columns(start, N: gl.constexpr, S: gl.constexpr):
    """Positions start to start + N - 1, in wgmma's layout S, as (first, column), each (1, N).

    Their sum is the position. `first` is the same for all columns of a thread, and `column` is
    known when the kernel is compiled. A mask compares `column` with a number for each row, and
    needs no registers for positions. Without `opaque`, the compiler adds what a loop does not
    change to `column` before that loop, and keeps 16 or 32 sums in registers.
    """
    n = gl.expand_dims(gl.arange(0, N, layout=gl.SliceLayout(0, S)), 0)
    return opaque(start + (n & LANE)), n & ~LANE


@gluon.jit
def first_lane(x):
    """Broadcast an int32 from the first thread of each warp."""
    return _on_int32("shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", x, False)
