"""Small jit functions that the forward and backward kernels share.

`features` is `kernels.options.Features`.
"""

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)
# Constants of the dropout hash. Combined with a uint32, they become uint32.
STIR = tl.constexpr(0x7FEB352D)
GOLDEN = tl.constexpr(0x9E3779B9)


@triton.jit
def load_tile(
    x, batch, head, row, n_rows, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
    MASK_ROWS: tl.constexpr,
):  # fmt: skip
    """Load rows [row, row + ROWS) of one head of x, zero beyond its edges: (ROWS, BLOCK_D).

    Args:
        x: from `kernels.triton.operands.operand`, a TMA descriptor or (pointer, *strides).
        MASK_ROWS: whether the tile may reach past the last row.
    """
    if isinstance(x, tl.tensor_descriptor):
        # TMA fills elements beyond the edges of the tensor with zeros: no mask.
        return x.load([batch, head, row, 0]).reshape([ROWS, BLOCK_D])
    else:
        ptrs, rows, cols = _tile_pointers(x, batch, head, row, ROWS, BLOCK_D)
        # Four cases: a mask that is always true would still cost registers and instructions.
        if MASK_ROWS and HEAD_DIM != BLOCK_D:
            inside = (rows[:, None] < n_rows) & (cols[None, :] < HEAD_DIM)
            return tl.load(ptrs, mask=inside, other=0.0)
        elif MASK_ROWS:
            return tl.load(ptrs, mask=rows[:, None] < n_rows, other=0.0)
        elif HEAD_DIM != BLOCK_D:
            return tl.load(ptrs, mask=cols[None, :] < HEAD_DIM, other=0.0)
        else:
            return tl.load(ptrs)


@triton.jit
def store_tile(
    x, batch, head, row, n_rows, values, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Store the part of a (ROWS, BLOCK_D) tile that is inside x, given as in `load_tile`."""
    if isinstance(x, tl.tensor_descriptor):
        # TMA drops elements beyond the edges.
        x.store([batch, head, row, 0], values.to(x.dtype).reshape([1, 1, ROWS, BLOCK_D]))
    else:
        ptrs, rows, cols = _tile_pointers(x, batch, head, row, ROWS, BLOCK_D)
        inside = rows[:, None] < n_rows
        if HEAD_DIM != BLOCK_D:
            inside = inside & (cols[None, :] < HEAD_DIM)
        tl.store(ptrs, values.to(ptrs.dtype.element_ty), mask=inside)


@triton.jit
def _tile_pointers(x, batch, head, row, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Pointers (ROWS, BLOCK_D), row numbers and column numbers of a tile of x, (pointer, *strides).

    The start of the tile is computed in int64, because a row number times a stride exceeds 2^31 on
    long contexts. Offsets within a tile stay int32, which saves registers and is safe for the row
    strides that `kernels.checks` allows.
    """
    ptr, stride_b, stride_t, stride_h = x
    tile = ptr + tl.cast(batch, tl.int64) * stride_b + tl.cast(head, tl.int64) * stride_h
    tile += tl.cast(row, tl.int64) * stride_t
    rows, cols = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    return tile + rows[:, None] * stride_t + cols[None, :], row + rows, cols


@triton.jit
def tanh_ratio(x):
    """Numerator and denominator of tanh(x), accurate to 3 roundings.

    tanh(x) is x times a ratio of polynomials in x^2, a minimax fit of the relative error on [0, 9];
    beyond 9, tanh is 1 in fp32. The definition by exp costs more, because it cancels near 0.
    """
    # A NaN must stay NaN: by default, tl.minimum and tl.maximum would return the bound.
    x = tl.minimum(x, 9.0, propagate_nan=tl.PropagateNan.ALL)
    x = tl.maximum(x, -9.0, propagate_nan=tl.PropagateNan.ALL)
    y = x * x
    p = 1.0 + y * (0.13381042 + y * (3.4956075e-3 + y * (2.0609388e-5 + y * 1.3355051e-8)))
    q = 1.0 + y * (0.46714357 + y * (2.5877057e-2 + y * (3.2856659e-4 + y * 7.7767254e-7)))
    return x * p, q


@triton.jit
def cap_scores(qk, softcap_scale, features: tl.constexpr):
    """Apply the softcap: tanh(softmax_scale / softcap * qk), or qk if there is none.

    The result times scale_log2, softcap * log2(e) or softmax_scale * log2(e), is a score in base 2.
    """
    if features.softcap:
        numerator, denominator = tanh_ratio(qk * softcap_scale)
        return numerator / denominator
    else:
        return qk


@triton.jit
def add_alibi(qk, position, key, slope, features: tl.constexpr):
    """Subtract slope * |position - key| from products of q and k, with ALiBi; both must broadcast.

    Positions are exact in fp32 up to 2^24 tokens. The slope is divided by the scale of the scores.
    """
    if features.alibi:
        return qk - slope * tl.abs(position.to(tl.float32) - key.to(tl.float32))
    else:
        return qk


@triton.jit
def load_slope(slopes_ptr, head, features: tl.constexpr):
    """ALiBi's slope of a head; 0 without ALiBi."""
    if features.alibi:
        return tl.load(slopes_ptr + head)
    else:
        return 0.0


@triton.jit
def uncap_gradient(ds, qk, features: tl.constexpr):
    """Gradient of the scores before the softcap, if any; qk is the result of `cap_scores`."""
    if features.softcap:
        return ds * (1.0 - qk * qk)
    else:
        return ds


@triton.jit
def _stir(x):
    """First step of `_mix`: a bijection that carries low bits into the high ones."""
    return (x ^ (x >> 16)) * STIR


@triton.jit
def _mix(x):
    """32-bit integer hash (lowbias32 by Chris Wellons): two multiplications, three xor-shifts."""
    x = _stir(x)
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def dropout_head_key(batch_head, call):
    """Dropout key of one (batch, head) pair.

    The number of the first query, a multiple of 16, is in the key: kernels count queries from 0.
    """
    # Mix each half of the seed before the XOR, and salt one of them: seeds with the same XOR of
    # their halves, or with swapped halves, must not share a key.
    seed = tl.load(call.seed_ptr).to(tl.uint64)
    low = _mix(seed.to(tl.uint32))
    high = _mix((seed >> 32).to(tl.uint32) ^ 0x85EBCA6B)
    return _mix((low ^ high) + GOLDEN * batch_head.to(tl.uint32)) + GOLDEN * call.first_query.to(
        tl.uint32
    )


@triton.jit
def dropout_keep(head_key, start_m, m, start_n, n, threshold):
    """Mask of the probabilities that dropout keeps: a pure function of (seed, b, h, query, key).

    The function of `kernels.reference.standard.dropout_keep_mask`, for queries start_m + m and keys
    start_n + n. m and n broadcast; bit 3 of the starts is clear, and no sum carries into it.

    Elements whose query and key differ only in bit 3 share a hash up to its last multiplication. In
    the layout of the tensor cores from Ampere to Hopper, one thread holds all four elements of such
    a group, also in a transposed tile. The compiler recognises this and hashes once for each group,
    because m and n are passed separately from the start of the tile.
    """
    row_key = _stir(head_key + GOLDEN * (start_m + (m & ~8)).to(tl.uint32))
    x = _stir(row_key ^ (GOLDEN * (start_n + (n & ~8)).to(tl.uint32)))
    first_key = (n & 8) == 0
    upper = tl.where(first_key, 0x846CA68B, 0x915F77F5)
    multiplier = tl.where((m & 8) == 0, upper, tl.where(first_key, 0x93D765DD, 0xADB4A92D))
    # The threshold is an int32 argument with the bits of a uint32: compare unsigned.
    return (x ^ (x >> 15)) * multiplier >= threshold.to(tl.uint32)
