"""The residual stream: what layers add to it, and its normalisation before the next one.

A layer does not add its output itself. It leaves it pending, so that one pass over memory adds it
and normalises the sum, and one goes back.
"""

from typing import NamedTuple

from torch import Tensor, nn

from kernels.layer_norm import add_bias, add_branch, add_layer_norm


class Pending(NamedTuple):
    """What is yet to be added to the stream: branch + bias."""

    branch: Tensor  # (B, T, C)
    bias: Tensor | None  # (C,)


def leave(branch: Tensor, bias: Tensor | None, dropout: nn.Dropout) -> Pending:
    """What `add_and_normalise` is to add: branch + bias, after dropout."""
    if dropout.training and dropout.p > 0.0:
        return Pending(dropout(add_bias(branch, bias)), None)
    return Pending(branch, bias)


def add(x: Tensor, pending: Pending | None) -> Tensor:
    """The stream x (B, T, C) with what is pending added to it."""
    return x if pending is None else add_branch(x, *pending)


def add_and_normalise(
    x: Tensor, pending: Pending | None, norm: nn.LayerNorm
) -> tuple[Tensor, Tensor]:
    """The sum as of `add`, and its normalisation in the dtype of the next layer's products."""
    branch, bias = pending or (None, None)
    return add_layer_norm(x, branch, bias, norm.weight, norm.bias, eps=norm.eps)
