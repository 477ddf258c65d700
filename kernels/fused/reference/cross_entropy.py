"""Losses of rows of logits and their gradient in plain PyTorch: what Triton's kernel must give."""

import torch
from torch import Tensor

from ..cross_entropy import LossOptions


def row_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    losses: Tensor,
    options: LossOptions,
    row_weights: Tensor | None,
    with_gradients: bool,
) -> None:
    """Write the loss of each row and, if wanted, turn the logits into its gradient.

    Args:
        logits: (N, V); overwritten where gradients are wanted.
        targets: (N,) int64.
        losses: (N,) fp32 or fp64, written.
        options: as `kernels.fused.cross_entropy.linear_cross_entropy` has them.
        row_weights: (N,), a factor on each row's gradient; its loss is given without. None: 1.

    Raises:
        IndexError: a target that counts is none of the vocabulary.
    """
    counts = targets != options.ignore_index
    known = targets[counts]
    if known.numel() and not 0 <= known.min() <= known.max() < options.vocab_size:
        raise IndexError(
            f"targets lie in [{known.min()}, {known.max()}] and must lie in "
            f"[0, {options.vocab_size}), or be ignore_index={options.ignore_index}"
        )
    target = targets.where(counts, 0)[:, None]
    scores = logits[:, : options.vocab_size].to(losses.dtype)
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    # not scores - lse, which loses what the logarithm of a large sum rounds off
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
