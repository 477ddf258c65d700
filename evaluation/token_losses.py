"""The loss of every single token of a validation set, from which all statistics are made."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor, nn

from training.distributed import Processes


@torch.no_grad()
def token_losses(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor, Tensor | None, Tensor]],
    n_tokens: int,
    processes: Processes,
    autocast: Callable[[], AbstractContextManager],
) -> np.ndarray:
    """Losses by position in the stream, of the batches of all processes.

    Args:
        model: called as model(tokens, targets, doc_start=doc_start, reduction="none"); in the mode
            it is to be evaluated in.
        batches: this process's share: (tokens (B, T), targets (B, S) of the last S tokens,
            doc_start (B, T) or None, positions (n, S) in the stream of the targets of the first
            n <= B rows), all on the CPU; as many batches on every process.
        n_tokens: length of the stream.
        autocast: makes the context for the forward pass.

    Returns:
        (n_tokens,) float32, nats; NaN where nothing was scored. The same on every process.

    Raises:
        FloatingPointError: a loss is not finite.
        AssertionError: a position was scored twice.
    """
    device = processes.device
    losses = torch.zeros(n_tokens, dtype=torch.float32, device=device)
    scored = torch.zeros(n_tokens, dtype=torch.int32, device=device)
    for tokens, targets, doc_start, positions in batches:
        inputs = [
            part if part is None else part.to(device, non_blocking=True)
            for part in (tokens, targets, doc_start)
        ]
        with autocast():
            loss = model(*inputs[:2], doc_start=inputs[2], reduction="none")
        where = positions.to(device).flatten()
        losses[where] = loss[: len(positions)].flatten().float()
        scored.index_add_(0, where, torch.ones_like(where, dtype=scored.dtype))
    processes.sum(losses)
    processes.sum(scored)
    assert int(scored.max()) <= 1, "a position was scored twice"
    n_broken = int((~losses.isfinite()).sum())
    if n_broken:
        raise FloatingPointError(
            f"the losses of {n_broken:,} of {int(scored.sum()):,} tokens are not finite: the model "
            "is broken. Move its newest checkpoint away, and the one before it is evaluated"
        )
    return torch.where(scored == 1, losses, torch.nan).cpu().numpy()
