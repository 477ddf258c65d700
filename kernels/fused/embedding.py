"""Rows of a table, whose gradient sums the rows of repeated indices in parallel."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..registration import not_differentiable, operator
from ..triton import unsupported_transform


def embedding(indices: Tensor, table: Tensor) -> Tensor:
    """Look up rows of a table, as `F.embedding`; repeated calls give the same gradient.

    On a GPU, the gradient is PyTorch's own kernel. torch.compile would replace it by index_put,
    which is either not repeatable, or adds the rows of each index one by one: that takes a
    millisecond for a thousand occurrences of a frequent token.

    Args:
        indices: (...) int64 or int32, in [0, N).
        table: (N, C), floating-point.

    Returns:
        (..., C) in the dtype of the table.
    """
    if not table.is_cuda or unsupported_transform() is not None:
        return F.embedding(indices, table)
    return _Embedding.apply(indices, table)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, indices: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.n_rows = table.shape[0]
        return F.embedding(indices, table)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        (indices,) = ctx.saved_tensors
        return None, torch.ops.papilio.embedding_bwd(*grads, indices, ctx.n_rows)


def _fake(grad, indices, n_rows):
    return grad.new_empty(n_rows, grad.shape[-1])


@operator(
    "embedding_bwd",
    fake=_fake,
    backward=not_differentiable("embedding has no second derivative: use F.embedding"),
)
def _embedding_bwd(grad: Tensor, indices: Tensor, n_rows: int) -> Tensor:
    """Gradient of a table, (n_rows, C)."""
    return torch.ops.aten.embedding_dense_backward(grad, indices, n_rows, -1, False)
