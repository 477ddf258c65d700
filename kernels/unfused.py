"""Attention as it was written before FlashAttention: one PyTorch operation after the other."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def unfused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    softmax_scale: float,
    kv_lengths: Tensor | None,
    dropout_p: float,
) -> Tensor:
    """Algorithm 0 of arXiv 2205.14135 in the dtype of q: the peer that speed-ups are measured over.

    `kernels.reference.standard_attention` is the exact one; this one leaves rounding to PyTorch
    (under autocast on a GPU, the softmax is computed and kept in float32), and so dropout.

    Args:
        q: (B, T_q, H, D), any floating dtype.
        k, v: (B, T_k, H, D).
        causal: hide the keys after each query, aligned at the bottom right.
        softmax_scale: factor on the scores.
        kv_lengths: (B,) integers, at least 1: the keys that are not padding; None: all.
        dropout_p: probability with which an attention weight is set to zero.

    Returns:
        (B, T_q, H, D).
    """
    q, k, v = (q * softmax_scale).transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    x = q @ k.mT  # (B, H, T_q, T_k); one name for scores and weights, to free what is not needed
    seq_q, seq_k = x.shape[-2:]
    if causal:
        hidden = torch.ones(seq_q, seq_k, dtype=torch.bool, device=x.device)
        x = x.masked_fill(hidden.triu(seq_k - seq_q + 1), -math.inf)
    if kv_lengths is not None:
        visible = torch.arange(seq_k, device=x.device) < kv_lengths[:, None, None, None]
        x = x.masked_fill(~visible, -math.inf)
    x = x.softmax(-1)
    if dropout_p > 0:
        x = F.dropout(x, dropout_p)
    return (x @ v).transpose(1, 2)
