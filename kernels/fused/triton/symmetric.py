"""Symmetric products of matrices: tiles above the diagonal are copies of those below."""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE, BLOCK_K, NUM_WARPS, NUM_STAGES = 128, 64, 8, 3


@triton.jit
def symmetric_kernel(
    a_ptr,  # (B, M, K)
    b_ptr,  # (B, M, K)
    addend_ptr,  # (B, M, M) contiguous; None: zero
    product_ptr,  # (B, M, M) contiguous, written
    alpha, beta, gamma,  # alpha a b^T + beta addend + gamma I
    n_rows, n_inner,
    a_batch_stride, a_row_stride, a_inner_stride, b_batch_stride, b_row_stride, b_inner_stride,
    TILE: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    tile_i, tile_j, matrix = tl.program_id(1), tl.program_id(0), tl.program_id(2).to(tl.int64)
    if tile_j > tile_i:
        return
    i, j, k = tl.arange(0, TILE)[:, None], tl.arange(0, TILE)[None, :], tl.arange(0, BLOCK_K)
    rows, columns = tile_i * TILE + i, tile_j * TILE + j
    a_ptrs = a_ptr + matrix * a_batch_stride + rows.to(tl.int64) * a_row_stride
    b_ptrs = b_ptr + matrix * b_batch_stride + columns.to(tl.int64) * b_row_stride
    a_ptrs += k[None, :] * a_inner_stride
    b_ptrs += k[:, None] * b_inner_stride
    acc = tl.zeros((TILE, TILE), tl.float32)
    for start in range(0, n_inner, BLOCK_K):
        left = n_inner - start
        a = tl.load(a_ptrs, (rows < n_rows) & (k[None, :] < left), other=0.0)
        b = tl.load(b_ptrs, (columns < n_rows) & (k[:, None] < left), other=0.0)
        acc = tl.dot(a, b, acc)
        a_ptrs += BLOCK_K * a_inner_stride
        b_ptrs += BLOCK_K * b_inner_stride

    inside = (rows < n_rows) & (columns < n_rows)
    product_ptr += matrix * n_rows * n_rows
    acc *= alpha
    if addend_ptr is not None:
        addend_ptr += matrix * n_rows * n_rows
        addend = tl.load(addend_ptr + rows * n_rows + columns, inside, other=0.0)
        acc += beta * addend.to(tl.float32)
    acc = tl.where(rows == columns, acc + gamma, acc)
    result = acc.to(product_ptr.dtype.element_ty)
    tl.store(product_ptr + rows * n_rows + columns, result, inside)
    if tile_i != tile_j:
        rows, columns = tile_j * TILE + i, tile_i * TILE + j
        inside = (rows < n_rows) & (columns < n_rows)
        tl.store(product_ptr + rows * n_rows + columns, tl.trans(result), inside)


def symmetric_product(
    a: Tensor, b: Tensor, addend: Tensor | None = None,
    *, alpha: float = 1.0, beta: float = 0.0, gamma: float = 0.0,
) -> Tensor:  # fmt: skip
    """Compute alpha a b^T + beta addend + gamma I, which must be symmetric, (B, M, M).

    The interface is that of `kernels.fused.reference.symmetric.symmetric_product`, but the addend
    must be contiguous, and the dtype fp16 or bf16, except in Triton's interpreter.
    """
    n_matrices, n_rows, n_inner = a.shape
    assert addend is None or addend.is_contiguous()
    assert a.element_size() == 2 or not a.is_cuda
    product = a.new_empty(n_matrices, n_rows, n_rows)
    n_tiles = triton.cdiv(n_rows, TILE)
    with torch.cuda.device_of(a):
        symmetric_kernel[n_tiles, n_tiles, n_matrices](
            a, b, addend, product, alpha, beta, gamma, n_rows, n_inner, *a.stride(), *b.stride(),
            TILE=TILE, BLOCK_K=BLOCK_K, num_warps=NUM_WARPS, num_stages=NUM_STAGES,
            enable_fp_fusion=True,
        )  # fmt: skip
    return product
