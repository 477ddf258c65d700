"""Elementwise parts of Muon's step, each one launch for a batch of matrices of one shape."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .addresses import AddressTable, are_aligned, dtype_of, tensor_at

BLOCK, TILE, NUM_WARPS = 2048, 64, 8


@triton.jit
def momentum_kernel(
    addresses_ptr,  # (B, 2) int64, addresses of: gradient, momentum buffer
    batch_ptr,  # (B, size) bf16, written
    divisor_ptr,  # () fp32: divisor of all gradients; None: 1
    skip_ptr,  # () fp32: leave the buffers unchanged unless it is 0; None: 0
    size,
    MOMENTUM: tl.constexpr,
    ALIGNED: tl.constexpr,  # 16 bytes divide the size and all addresses: loads are vectorised
    BLOCK: tl.constexpr,
):  # fmt: skip
    matrix = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # A CUDA graph cannot leave out a launch, so a skipped step masks its stores.
    n_stored = size
    if skip_ptr is not None:
        n_stored = tl.where(tl.load(skip_ptr) == 0.0, size, 0)
    # Masked accesses are vectorised only if the bounds are known to be multiples of the vector
    # size.
    if ALIGNED:
        size = tl.multiple_of(size, 4)
        n_stored = tl.multiple_of(n_stored, 4)
    inside = at < size
    gradients = tensor_at(addresses_ptr + 2 * matrix, tl.float32, ALIGNED) + at
    buffers = tensor_at(addresses_ptr + 2 * matrix + 1, tl.float32, ALIGNED) + at
    g = tl.load(gradients, inside, other=0.0)
    m = tl.load(buffers, inside, other=0.0)
    if divisor_ptr is not None:
        g = g / tl.load(divisor_ptr)
    m += (g - m) * (1.0 - MOMENTUM)
    tl.store(buffers, m, at < n_stored)
    # Nesterov's momentum. A skipped step writes it as well, although the result is not used:
    # otherwise the products that follow would read memory that was never written.
    tl.store(batch_ptr + matrix * size + at, (g + (m - g) * MOMENTUM).to(tl.bfloat16), inside)


@triton.jit
def apply_kernel(
    addresses_ptr,  # (B, 2) int64, addresses of: weight, cast (0: none)
    update_ptr,  # (B, M, N) floating, any strides
    factors_ptr,  # (B, M) fp32
    lr_ptr,  # () fp32
    skip_ptr,  # () fp32: change nothing unless it is 0; None: 0
    weight_decay, n_rows, n_columns, batch_stride, row_stride, column_stride,
    CAST: tl.constexpr,  # dtype of casts; None: there are none
    ALIGNED: tl.constexpr,  # 16 bytes divide all addresses, so loads are vectorised
    TILE: tl.constexpr,
):  # fmt: skip
    # Square tiles, because an update may have contiguous rows or contiguous columns.
    matrix = tl.program_id(2).to(tl.int64)
    first_row, first_column = tl.program_id(1) * TILE, tl.program_id(0) * TILE
    i, j = tl.arange(0, TILE)[:, None], tl.arange(0, TILE)[None, :]
    rows = i < n_rows - first_row
    inside = rows & (j < n_columns - first_column)
    # Elements may be further apart than int32 reaches, but not those of one tile.
    at = first_row.to(tl.int64) * n_columns + first_column + (i * n_columns + j)
    weights = tensor_at(addresses_ptr + 2 * matrix, tl.float32, ALIGNED) + at
    update_ptr += matrix * batch_stride + first_row.to(tl.int64) * row_stride
    update_ptr += first_column.to(tl.int64) * column_stride
    factors_ptr += matrix * n_rows + first_row
    lr = tl.load(lr_ptr)

    w = tl.load(weights, inside, other=0.0)
    y = tl.load(update_ptr + i * row_stride + j * column_stride, inside, other=0.0).to(tl.float32)
    y *= tl.load(factors_ptr + i, rows, other=0.0) * lr
    w = w * (1.0 - lr * weight_decay) - y
    # A skipped step masks its stores, as above. A bound on rows does not affect vectorisation.
    if skip_ptr is not None:
        inside = inside & (i < tl.where(tl.load(skip_ptr) == 0.0, TILE, 0))
    tl.store(weights, w, inside)
    # Write the cast of the weight for the next step's matrix products, if this weight has one.
    if CAST is not None:
        row = addresses_ptr + 2 * matrix + 1
        inside = inside & (i < tl.where(tl.load(row) == 0, 0, TILE))
        tl.store(tensor_at(row, CAST, ALIGNED) + at, w.to(CAST), inside)


class MuonUpdate:
    """Elementwise parts of Muon's step for one batch of matrices (M, N), fp32 and contiguous.

    Both methods have the same interface as those of `kernels.fused.reference.muon.MuonUpdate`.
    """

    def __init__(self) -> None:
        self._tables = AddressTable(), AddressTable()

    def momentum(
        self, grads: Sequence[Tensor], buffers: Sequence[Tensor], *, momentum: float,
        divisor: Tensor | None, skip: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Update the momentum buffers; returns the Nesterov momenta, (B, M, N) bf16."""
        grads = [grad.contiguous() for grad in grads]
        batch = grads[0].new_empty((len(grads), *grads[0].shape), dtype=torch.bfloat16)
        size = grads[0].numel()
        if size == 0:  # a process may have no row of a sharded matrix
            return batch
        tensors = [x for pair in zip(grads, buffers, strict=True) for x in pair]
        aligned = size % 4 == 0 and are_aligned(tensors)
        with torch.cuda.device_of(batch):
            momentum_kernel[(triton.cdiv(size, BLOCK), len(grads))](
                self._tables[0].update(tensors, batch.device), batch, divisor, skip, size,
                MOMENTUM=momentum, ALIGNED=aligned, BLOCK=BLOCK, num_warps=NUM_WARPS,
                enable_fp_fusion=True,
            )  # fmt: skip
        torch.autograd.graph.increment_version(buffers)
        return batch

    def apply(
        self, weights: Sequence[Tensor], casts: Sequence[Tensor | None], update: Tensor,
        factors: Tensor, *, lr: Tensor, weight_decay: float, skip: Tensor | None,
    ) -> None:  # fmt: skip
        """Subtract the update, (B, M, N) in any strides, times a factor per row, (B, M, 1)."""
        n_matrices, n_rows, n_columns = update.shape
        if update.numel() == 0:
            return
        tensors = [x for pair in zip(weights, casts, strict=True) for x in pair]
        grid = triton.cdiv(n_columns, TILE), triton.cdiv(n_rows, TILE), n_matrices
        with torch.cuda.device_of(update):
            apply_kernel[grid](
                self._tables[1].update(tensors, update.device), update, factors.contiguous(), lr,
                skip, weight_decay, n_rows, n_columns, *update.stride(),
                CAST=dtype_of(casts), ALIGNED=are_aligned(tensors), TILE=TILE,
                num_warps=NUM_WARPS, enable_fp_fusion=True,
            )  # fmt: skip
        torch.autograd.graph.increment_version(weights)
