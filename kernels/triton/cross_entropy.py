"""Losses of rows of logits and their gradient, in one visit of a row.

A row of 50,304 logits in bf16 is 98 KiB: too long for registers, but what runs at a time fits into
the L2 cache, so that only the first of two passes over a row reads it from memory.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.options import LossOptions
from kernels.triton.primitives import LN2, LOG2E, tanh_ratio

BLOCK_V, NUM_WARPS = 8192, 16
# Below all scores, and finite: the difference of two infinities would be NaN.
LOWEST = tl.constexpr(-1e38)


@triton.jit
def scores_at(logits_ptr, columns, vocab_size, softcap, HAS_SOFTCAP: tl.constexpr):
    """fp32 logits of a row, capped; -inf from `vocab_size` on."""
    scores = tl.load(logits_ptr + columns, mask=columns < vocab_size, other=-float("inf"))
    scores = scores.to(tl.float32)
    if HAS_SOFTCAP:
        numerator, denominator = tanh_ratio(scores / softcap)
        capped = softcap * (numerator / denominator)
        scores = tl.where(columns < vocab_size, capped, -float("inf"))
    return scores


@triton.jit
def cross_entropy_kernel(
    logits_ptr,  # (N, n_columns): become their gradient
    targets_ptr,  # (N,) int64
    weights_ptr,  # (N,) fp32, or None
    losses_ptr,  # (N,) fp32
    logits_stride,
    n_columns,
    vocab_size,
    softcap,
    z_loss,
    ignore_index,
    HAS_SOFTCAP: tl.constexpr,
    WITH_GRADIENTS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One row a program."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    target = tl.load(targets_ptr + row)
    block = tl.arange(0, BLOCK_V)
    if target == ignore_index:
        tl.store(losses_ptr + row, 0.0)
        if WITH_GRADIENTS:
            for start in range(0, n_columns, BLOCK_V):
                columns = start + block
                zeros = tl.zeros((BLOCK_V,), logits_ptr.dtype.element_ty)
                tl.store(logits_ptr + columns, zeros, mask=columns < n_columns)
    else:
        # each place of a block has a maximum and a sum of its own, so that nothing is exchanged
        # between threads before the end
        highest = tl.full((BLOCK_V,), LOWEST, tl.float32)
        total = tl.zeros((BLOCK_V,), tl.float32)
        for start in range(0, vocab_size, BLOCK_V):
            scores = scores_at(logits_ptr, start + block, vocab_size, softcap, HAS_SOFTCAP)
            before = highest
            highest = tl.maximum(highest, scores)
            total = total * tl.exp2((before - highest) * LOG2E)
            total += tl.exp2((scores - highest) * LOG2E)
        top = tl.max(highest, 0)
        total = tl.sum(total * tl.exp2((highest - top) * LOG2E), 0)
        # not scores - lse, which loses what adding the two parts of lse rounds off
        log2_total = tl.log2(total)
        lse = top + log2_total * LN2

        is_known = (target >= 0) & (target < vocab_size)
        known = tl.where(is_known, target, 0)
        at_target = scores_at(logits_ptr, known, vocab_size, softcap, HAS_SOFTCAP)
        loss = (top - at_target) + log2_total * LN2 + z_loss * lse * lse
        tl.store(losses_ptr + row, tl.where(is_known, loss, float("nan")))

        if WITH_GRADIENTS:
            factor = 1.0 + 2.0 * z_loss * lse
            weight = 1.0
            if weights_ptr is not None:
                weight = tl.load(weights_ptr + row)
            for start in range(0, n_columns, BLOCK_V):
                columns = start + block
                scores = scores_at(logits_ptr, columns, vocab_size, softcap, HAS_SOFTCAP)
                gradient = tl.exp2((scores - top) * LOG2E - log2_total) * factor
                gradient = tl.where(columns == target, gradient - 1.0, gradient)
                if HAS_SOFTCAP:
                    inner = scores / softcap
                    gradient *= 1.0 - inner * inner
                # of padding, where the cap would make -inf of it
                gradient = tl.where(columns < vocab_size, gradient * weight, 0.0)
                tl.store(
                    logits_ptr + columns,
                    gradient.to(logits_ptr.dtype.element_ty),
                    mask=columns < n_columns,
                )


def cross_entropy_of_rows(
    logits: Tensor,
    targets: Tensor,
    losses: Tensor,
    options: LossOptions,
    row_weights: Tensor | None,
    with_gradients: bool,
) -> None:
    """Write the loss of each row and, if wanted, turn the logits into its gradient.

    As `kernels.reference.cross_entropy.cross_entropy_of_rows`, but that a target which is none of
    the vocabulary makes its loss NaN. All rows are contiguous.
    """
    cross_entropy_kernel[(len(logits),)](
        logits,
        targets,
        row_weights,
        losses,
        logits.stride(0),
        logits.shape[1],
        options.vocab_size,
        options.softcap,
        options.z_loss,
        options.ignore_index,
        HAS_SOFTCAP=options.softcap > 0,
        WITH_GRADIENTS=with_gradients,
        BLOCK_V=min(BLOCK_V, triton.next_power_of_2(logits.shape[1])),
        num_warps=NUM_WARPS,
    )
