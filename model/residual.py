"""Residual stream: deferred addition of a layer's output, fused with the next normalisation.

A layer does not add its output to the stream itself. It returns the output as pending, and one
kernel then adds it and normalises the sum: one pass over memory forward, and one backward.
"""

from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F

from kernels.fused.layer_norm import add_bias, add_branch, add_layer_norm, add_rms_norm
from model.block_config import BlockConfig

Norm = nn.LayerNorm | nn.RMSNorm


class DeferredResidual(NamedTuple):
    """Layer output that is still to be added to the residual stream: branch + bias."""

    branch: Tensor  # (B, T, C)
    bias: Tensor | None  # (C,)


def defer(branch: Tensor, bias: Tensor | None, dropout: nn.Dropout) -> DeferredResidual:
    """Apply dropout to branch + bias, and leave the addition to `resolve_and_normalise`."""
    if dropout.training and dropout.p > 0.0:
        return DeferredResidual(dropout(add_bias(branch, bias)), None)
    return DeferredResidual(branch, bias)


def resolve(x: Tensor, pending: DeferredResidual | None) -> Tensor:
    """Add the pending output, if any, to the residual stream x (B, T, C)."""
    return x if pending is None else add_branch(x, *pending)


def make_norm(config: BlockConfig) -> Norm:
    """Build the normalisation before a layer, over n_embd features."""
    if config.norm == "rms_norm":
        return nn.RMSNorm(config.n_embd, eps=config.eps("rms_norm"))
    return nn.LayerNorm(config.n_embd, eps=config.eps("layer_norm"), bias=config.bias)


def normalise(x: Tensor, norm: Norm) -> Tensor:
    """Normalise x (..., C); under autocast in the dtype of the weight.

    RMSNorm divides x by its root mean square: Zhang and Sennrich 2019, arXiv 1910.07467.
    """
    if isinstance(norm, nn.LayerNorm):
        return norm(x)
    x = x.to(norm.weight.dtype)
    return F.rms_norm(x, norm.normalized_shape, norm.weight, norm.eps)


def resolve_and_normalise(
    x: Tensor, pending: DeferredResidual | None, norm: Norm
) -> tuple[Tensor, Tensor]:
    """Add the pending output, and normalise the sum.

    Returns:
        The sum, as `resolve` computes it, and its normalisation, in the dtype of the next matmul.
    """
    branch, bias = pending or (None, None)
    if isinstance(norm, nn.RMSNorm):
        assert norm.eps is not None  # set by make_norm
        return add_rms_norm(x, branch, bias, norm.weight, eps=norm.eps)
    return add_layer_norm(x, branch, bias, norm.weight, norm.bias, eps=norm.eps)
