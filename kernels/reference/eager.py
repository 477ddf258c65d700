"""Attention as it was written before FlashAttention: one PyTorch operation after the other."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from ..call import AttentionCall


def obstacle(call: AttentionCall) -> str | None:
    """Why this cannot serve the call, None if it can."""
    q, k = call.q, call.k
    if call.return_lse:
        return "it does not support return_lse=True"
    if call.deterministic and q.device.type != "cpu":
        return "it does not support deterministic=True"
    if q.shape[2] != k.shape[2]:
        return "it does not support fewer heads in k than in q"
    if call.arguments.get("causal") and q.shape[1] > k.shape[1]:
        return "it does not support causal with T_q > T_k"  # rows that see no key
    return call.lacks({"causal", "kv_lengths", "dropout_p"})


def eager_attention(call: AttentionCall) -> tuple[Tensor, None]:
    """Algorithm 0 of arXiv 2205.14135 in the dtype of q: the peer that speed-ups are measured over.

    `kernels.reference.standard.standard_attention` is the exact one; this one leaves rounding to
    PyTorch (under autocast on a GPU, the softmax is computed and kept in float32), and so dropout.

    Returns:
        out (B, T_q, H, D) in the dtype of q.
    """
    arguments = call.arguments
    q = (call.q * call.softmax_scale).transpose(1, 2)
    k, v = call.k.transpose(1, 2), call.v.transpose(1, 2)
    x = q @ k.mT  # (B, H, T_q, T_k); one name for scores and weights, to free what is not needed
    seq_q, seq_k = x.shape[-2:]
    if arguments.get("causal"):
        hidden = torch.ones(seq_q, seq_k, dtype=torch.bool, device=x.device)
        x = x.masked_fill(hidden.triu(seq_k - seq_q + 1), -math.inf)
    kv_lengths = arguments.get("kv_lengths")
    if kv_lengths is not None:
        visible = torch.arange(seq_k, device=x.device) < kv_lengths[:, None, None, None]
        x = x.masked_fill(~visible, -math.inf)
    x = x.softmax(-1)
    dropout_p = arguments.get("dropout_p", 0.0)
    if dropout_p > 0:
        x = F.dropout(x, dropout_p)
    return (x @ v).transpose(1, 2).to(call.q.dtype), None  # of which autocast makes another
