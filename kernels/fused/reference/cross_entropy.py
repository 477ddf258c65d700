"""Row-wise losses of logits and their gradient in plain PyTorch: the reference for the kernel."""

import torch
from torch import Tensor

from ..cross_entropy import LossOptions


def row_cross_entropy(
    logits: Tensor, targets: Tensor, losses: Tensor, options: LossOptions,
    row_weights: Tensor | None, with_gradients: bool,
) -> None:  # fmt: skip
    """Write the loss of each row and, if wanted, overwrite the logits with its gradient.

    Args:
        logits: (N, V); overwritten if gradients are wanted.
        targets: (N,) int64.
        losses: (N,) fp32 or fp64, written.
        options: as in `kernels.fused.cross_entropy.linear_cross_entropy`.
        row_weights: (N,), a factor on each row's gradient, but not on its loss. None: 1.

    Raises:
        IndexError: a target that counts is outside of the vocabulary.
    """
    counts = targets != options.ignore_index
    counted = targets[counts]
    if counted.numel() and not 0 <= counted.min() <= counted.max() < options.vocab_size:
        raise IndexError(
            f"targets lie in [{counted.min()}, {counted.max()}] and must lie in "
            f"[0, {options.vocab_size}), or be ignore_index={options.ignore_index}"
        )
    target = targets.where(counts, 0)[:, None]
    scores = logits[:, : options.vocab_size].to(losses.dtype)
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    # Not scores - lse, which would lose digits to the rounding of a large lse.
    log_p, lse = scores.log_softmax(1), scores.logsumexp(1)
    loss = options.z_loss * lse.square() - log_p.gather(1, target)[:, 0]
    losses.copy_(loss.where(counts, 0.0))
    if not with_gradients:
        return
    gradient = log_p.exp() * (1 + 2 * options.z_loss * lse)[:, None]
    gradient.scatter_add_(1, target, gradient.new_full(target.shape, -1.0))
    if options.softcap:
        gradient *= 1 - (scores / options.softcap).square()
    if row_weights is not None:
        gradient *= row_weights[:, None]
    logits[:, : options.vocab_size] = gradient.where(counts[:, None], 0.0)
    logits[:, options.vocab_size :] = 0.0
