"""Row-wise losses of logits and their gradient, one program per row.

A row of 50,304 logits in bf16 is 98 KiB: too long for registers. But the rows in flight fit in the
L2 cache, so only the first of the two passes over a row reads it from memory.
"""

import triton
import triton.language as tl
from torch import Tensor

from ...triton.primitives import LN2, LOG2E, tanh_ratio
from ..cross_entropy import LossOptions

# The fastest on an H100. With 32 registers per thread, two rows fit on an SM: one can load while
# the other computes.
BLOCK_V, NUM_WARPS, MAX_REGISTERS = 4096, 32, 32
# Up to this softcap, a cheaper tanh has an error of at most 4e-6 in a score.
LARGE_SOFTCAP = 32.0
# Below all scores, and finite: the difference of two infinities would be NaN.
LOWEST = tl.constexpr(-1e38)


@triton.jit
def to_scores(logits, softcap, SOFTCAP: tl.constexpr):
    """Convert logits to fp32 and apply the softcap, softcap * tanh(logits / softcap)."""
    scores = logits.to(tl.float32)
    if SOFTCAP == "small":
        # tanh by exp2 takes a third of the instructions of `tanh_ratio`. It cancels near 0, which
        # leaves an absolute error of 1e-7 softcap.
        scores = softcap - 2.0 * softcap / (1.0 + tl.exp2(scores * (2.0 * LOG2E / softcap)))
    elif SOFTCAP == "large":
        numerator, denominator = tanh_ratio(scores / softcap)
        scores = softcap * (numerator / denominator)
    return scores


@triton.jit
def add_scores(scores, highest, total):
    """Update the running maximum and sum of exponentials, separately for each lane of a block."""
    before = highest
    highest = tl.maximum(highest, scores)
    total = total * tl.exp2((before - highest) * LOG2E) + tl.exp2((scores - highest) * LOG2E)
    return highest, total


@triton.jit
def loss_gradient(
    scores, columns, target, top, log2_total, factor, weight, softcap, SOFTCAP: tl.constexpr
):
    """Gradient of the logits: (factor * softmax - one_hot(target)) * weight."""
    # Not exp(score - lse): the rounding of lse, a large number, would be a relative error here.
    gradient = tl.exp2((scores - top) * LOG2E - log2_total) * factor
    gradient = tl.where(columns == target, gradient - 1.0, gradient)
    if SOFTCAP is not None:
        inner = scores * (1.0 / softcap)
        gradient *= 1.0 - inner * inner
    return gradient * weight


@triton.jit
def cross_entropy_kernel(
    logits_ptr,  # (N, n_columns); overwritten with their gradient
    targets_ptr,  # (N,) int64
    weights_ptr,  # (N,) fp32, or None
    losses_ptr,  # (N,) fp32
    logits_stride, n_columns, vocab_size, softcap, z_loss, ignore_index,
    SOFTCAP: tl.constexpr,  # "small", "large" or None
    WITH_GRADIENTS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Process one row: the whole blocks of its logits without a mask, then the partial last one."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    dtype: tl.constexpr = logits_ptr.dtype.element_ty
    target = tl.load(targets_ptr + row)
    block = tl.arange(0, BLOCK_V)
    # An ignored row has loss 0. Its logits must still become zeros: the matrix products for the
    # gradients of hidden and weight read all rows.
    if target == ignore_index:
        tl.store(losses_ptr + row, 0.0)
        if WITH_GRADIENTS:
            for start in range(0, n_columns, BLOCK_V):
                columns = start + block
                tl.store(logits_ptr + columns, tl.zeros((BLOCK_V,), dtype), columns < n_columns)
    else:
        # A target outside of the vocabulary must not be dereferenced. A kernel cannot raise, so the
        # loss becomes NaN below.
        is_known = (target >= 0) & (target < vocab_size)
        at_target = tl.load(logits_ptr + tl.where(is_known, target, 0))
        at_target = to_scores(at_target, softcap, SOFTCAP)

        # First pass: an online log-sum-exp. Each lane keeps its own maximum and sum, so there is no
        # reduction across lanes in the loop.
        highest = tl.full((BLOCK_V,), LOWEST, tl.float32)
        total = tl.zeros((BLOCK_V,), tl.float32)
        whole = vocab_size // BLOCK_V * BLOCK_V
        for start in range(0, whole, BLOCK_V):
            # evict_last: the second pass reads these logits again.
            logits = tl.load(logits_ptr + start + block, eviction_policy="evict_last")
            scores = to_scores(logits, softcap, SOFTCAP)
            highest, total = add_scores(scores, highest, total)
        # The last block stays in registers: the second pass starts with it.
        last = whole + block
        logits = tl.load(logits_ptr + last, last < vocab_size, other=0.0)
        last_scores = to_scores(logits, softcap, SOFTCAP)
        seen = tl.where(last < vocab_size, last_scores, -float("inf"))
        highest, total = add_scores(seen, highest, total)

        # Reduce over the lanes, and write the loss. Not lse - at_target, because the rounding of a
        # large lse would be an absolute error of the loss.
        top = tl.max(highest, 0)
        log2_total = tl.log2(tl.sum(total * tl.exp2((highest - top) * LOG2E), 0))
        lse = top + log2_total * LN2
        loss = (top - at_target) + log2_total * LN2 + z_loss * lse * lse
        tl.store(losses_ptr + row, tl.where(is_known, loss, float("nan")))

        # Second pass: overwrite the logits with the gradient.
        if WITH_GRADIENTS:
            factor = 1.0 + 2.0 * z_loss * lse
            weight = 1.0
            if weights_ptr is not None:
                weight = tl.load(weights_ptr + row)
            gradient = loss_gradient(
                last_scores, last, target, top, log2_total, factor, weight, softcap, SOFTCAP
            )
            gradient = tl.where(last < vocab_size, gradient, 0.0)
            # The last block of logits is still in registers. Padding columns after it get zeros.
            for start in range(whole, n_columns, BLOCK_V):
                columns = start + block
                tl.store(logits_ptr + columns, gradient.to(dtype), columns < n_columns)
                gradient = tl.zeros((BLOCK_V,), tl.float32)
            # evict_first: this program is done with these lines, and other rows need the cache.
            for start in range(0, whole, BLOCK_V):
                columns = start + block
                logits = tl.load(logits_ptr + columns, eviction_policy="evict_first")
                scores = to_scores(logits, softcap, SOFTCAP)
                gradient = loss_gradient(
                    scores, columns, target, top, log2_total, factor, weight, softcap, SOFTCAP
                )
                tl.store(logits_ptr + columns, gradient.to(dtype), eviction_policy="evict_first")


def row_cross_entropy(
    logits: Tensor, targets: Tensor, losses: Tensor, options: LossOptions,
    row_weights: Tensor | None, with_gradients: bool,
) -> None:  # fmt: skip
    """Write the loss of each row and, if wanted, overwrite the logits with its gradient.

    Same as `kernels.fused.reference.cross_entropy.row_cross_entropy`, except that a target outside
    of the vocabulary makes its loss NaN. Rows are contiguous.
    """
    size = "large" if options.softcap > LARGE_SOFTCAP else "small" if options.softcap else None
    cross_entropy_kernel[(len(logits),)](
        logits, targets, row_weights, losses, logits.stride(0), logits.shape[1], *options,
        SOFTCAP=size, WITH_GRADIENTS=with_gradients,
        BLOCK_V=min(BLOCK_V, triton.next_power_of_2(logits.shape[1])), num_warps=NUM_WARPS,
        maxnreg=None if size == "large" else MAX_REGISTERS,  # which needs more
        enable_fp_fusion=True,
    )  # fmt: skip
