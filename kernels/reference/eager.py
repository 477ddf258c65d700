"""Eager (unfused) attention, one PyTorch operation after the other, as before FlashAttention."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from ..options import AttentionOptions


def unsupported_reason(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> str | None:
    """Reason why this implementation cannot serve the call, or None."""
    if options.return_lse:
        return "it does not support return_lse=True"
    if options.deterministic and q.device.type != "cpu":
        return "it does not support deterministic=True"
    if q.shape[2] != k.shape[2]:
        return "it does not support fewer heads in k than in q"
    if options.causal and q.shape[1] > k.shape[1]:
        return "it does not support causal with T_q > T_k"  # rows that see no key
    return options.unsupported_option({"causal", "kv_lengths", "dropout_p"})


def eager_attention(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
    """Algorithm 0 of arXiv 2205.14135 in the dtype of q: the baseline for speed-ups.

    The exact implementation is `kernels.reference.standard.standard_attention`. This one leaves
    rounding and dropout to PyTorch. Under autocast on a GPU, the softmax is computed and kept in
    float32.

    Returns:
        out (B, T_q, H, D) in the dtype of q.
    """
    dtype = q.dtype
    q = (q * options.softmax_scale).transpose(1, 2)
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    # Scores and weights, (B, H, T_q, T_k), share one name: the old tensor is freed at each step.
    x = q @ k.mT
    seq_q, seq_k = x.shape[-2:]
    if options.causal:
        hidden = torch.ones(seq_q, seq_k, dtype=torch.bool, device=x.device)
        x = x.masked_fill(hidden.triu(seq_k - seq_q + 1), -math.inf)
    if options.kv_lengths is not None:
        visible = torch.arange(seq_k, device=x.device) < options.kv_lengths[:, None, None, None]
        x = x.masked_fill(~visible, -math.inf)
    x = x.softmax(-1)
    if options.dropout_p > 0:
        x = F.dropout(x, options.dropout_p)
    return (x @ v).transpose(1, 2).to(dtype)  # autocast may have changed the dtype
