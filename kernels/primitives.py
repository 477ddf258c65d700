"""Small jit functions that the forward and the backward kernels share."""

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_tile(
    ptr,
    row,
    stride_row,
    offs_row,
    offs_d,
    n_rows,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASK_ROWS: tl.constexpr,
):
    """Rows `row + offs_row` of a (n_rows, HEAD_DIM) matrix, zero beyond its edges.

    The start of the tile is added to the pointer in int64, because a row number times a stride
    passes 2^31 on long contexts; offsets within a tile stay int32, which spares registers and holds
    for the row strides that `kernels.strides` allows.
    """
    tile = ptr + tl.cast(row, tl.int64) * stride_row
    ptrs = tile + offs_row[:, None] * stride_row + offs_d[None, :]
    if MASK_ROWS and HEAD_DIM != BLOCK_D:
        inside = ((row + offs_row)[:, None] < n_rows) & (offs_d[None, :] < HEAD_DIM)
        return tl.load(ptrs, mask=inside, other=0.0)
    elif MASK_ROWS:
        return tl.load(ptrs, mask=(row + offs_row)[:, None] < n_rows, other=0.0)
    elif HEAD_DIM != BLOCK_D:
        return tl.load(ptrs, mask=offs_d[None, :] < HEAD_DIM, other=0.0)
    else:
        return tl.load(ptrs)


@triton.jit
def store_tile(
    ptr,
    row,
    stride_row,
    offs_row,
    offs_d,
    n_rows,
    values,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write the part of a tile that lies inside the matrix, in the dtype of `ptr`."""
    tile = ptr + tl.cast(row, tl.int64) * stride_row
    ptrs = tile + offs_row[:, None] * stride_row + offs_d[None, :]
    inside = (row + offs_row)[:, None] < n_rows
    if HEAD_DIM != BLOCK_D:
        inside = inside & (offs_d[None, :] < HEAD_DIM)
    tl.store(ptrs, values.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def load_lse_log2(lse_ptr, offs_m, seq_q):
    """lse in units of log2, +inf for rows that see no key or do not exist: exp2(s - inf) is 0."""
    lse = tl.load(lse_ptr + offs_m, mask=offs_m < seq_q, other=float("inf"))
    return tl.where(lse == -float("inf"), float("inf"), lse * LOG2E)


@triton.jit
def key_bounds(
    start_m,
    seq_k,
    diagonal,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
):
    """(full, end) of the tile of queries at `start_m`: every row sees the keys [0, full), which
    are whole tiles; some rows see keys of [full, end); no row sees any from `end` on.
    """
    full = seq_k
    end = seq_k
    if IS_CAUSAL:
        full = tl.minimum(seq_k, tl.maximum(0, start_m + diagonal + 1))
        end = tl.minimum(seq_k, tl.maximum(0, start_m + BLOCK_M + diagonal))
    return full // BLOCK_N * BLOCK_N, end


@triton.jit
def visible_keys(offs_m, key, seq_k, diagonal, IS_CAUSAL: tl.constexpr):
    """(M, N) bool: the key exists, and under a causal mask lies at or below the diagonal."""
    visible = key[None, :] < seq_k
    if IS_CAUSAL:
        visible = visible & (key[None, :] <= offs_m[:, None] + diagonal)
    return visible


@triton.jit
def mix32(x):
    """A 32-bit integer hash (lowbias32, Chris Wellons): two multiplications, three xor-shifts."""
    x = x ^ (x >> 16)
    x = x * tl.full([], 0x7FEB352D, tl.uint32)
    x = x ^ (x >> 15)
    x = x * tl.full([], 0x846CA68B, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def dropout_head_key(seed_ptr, batch_head):
    """The key of one (batch, head) pair, from the int64 seed at `seed_ptr`."""
    seed = tl.load(seed_ptr).to(tl.uint64)
    low = mix32(seed.to(tl.uint32))
    high = mix32((seed >> 32).to(tl.uint32) ^ tl.full([], 0x85EBCA6B, tl.uint32))
    golden = tl.full([], 0x9E3779B9, tl.uint32)
    return mix32((low ^ high) + golden * batch_head.to(tl.uint32))


@triton.jit
def dropout_keep(head_key, query, key, threshold):
    """Which probabilities stay: a pure function of (seed, batch, head, query, key).

    `query` and `key` broadcast against each other. Queries and keys are hashed apart, so that an
    element costs one mix of its own. `kernels.reference.dropout_keep_mask` is the same function.
    """
    golden = tl.full([], 0x9E3779B9, tl.uint32)
    row_key = mix32(head_key + golden * query.to(tl.uint32))
    col_key = mix32(tl.full([], 0x85EBCA6B, tl.uint32) + golden * key.to(tl.uint32))
    return mix32(row_key ^ col_key) >= threshold.to(tl.uint32)
