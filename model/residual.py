"""The residual stream: what layers add to it, and its normalisation before the next one.

A layer does not add its output itself. It leaves it pending, so that one pass over memory adds it
and normalises the sum, and one goes back.
"""

from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F

from kernels.autocast import in_autocast_dtype
from kernels.fused.layer_norm import add_bias, add_branch, add_layer_norm
from model.config import BlockConfig

RMS_EPS = 1e-6
Norm = nn.LayerNorm | nn.RMSNorm


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


def make_norm(config: BlockConfig) -> Norm:
    """The normalisation before a layer, over n_embd numbers."""
    if config.norm == "rms_norm":
        return nn.RMSNorm(config.n_embd, eps=RMS_EPS)
    return nn.LayerNorm(config.n_embd, bias=config.bias)


def normalise(x: Tensor, norm: Norm) -> Tensor:
    """The normalisation of x (..., C), under autocast in the dtype of the weight.

    RMSNorm is x over the root of its mean square: Zhang and Sennrich 2019, arXiv 1910.07467.
    """
    if isinstance(norm, nn.LayerNorm):
        return norm(x)
    wide = x.to(norm.weight.dtype)
    return F.rms_norm(wide, norm.normalized_shape, norm.weight, norm.eps)


def add_and_normalise(x: Tensor, pending: Pending | None, norm: Norm) -> tuple[Tensor, Tensor]:
    """The sum as of `add`, and its normalisation in the dtype of the next layer's products."""
    if isinstance(norm, nn.RMSNorm):
        stream = add(x, pending)
        return stream, in_autocast_dtype(normalise(stream, norm).to(stream.dtype))
    branch, bias = pending or (None, None)
    return add_layer_norm(x, branch, bias, norm.weight, norm.bias, eps=norm.eps)
