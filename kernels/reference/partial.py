"""Forward and backward pass in plain PyTorch, with the interface of the kernels.

As in `kernels.triton.fwd` and `kernels.triton.bwd`, the backward pass takes the output and the
log-sum-exp as arguments. They may be those of more keys, as in ring attention. The score matrix is
held in memory, in fp32, or in fp64 for fp64.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..mask.block_mask import BlockSparseMask
from ..options import SCORE_OPTIONS, AttentionOptions
from .standard import finite, scores_and_slope, standard_attention, visible_keys


def attn_fwd(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """Forward pass: out (B, T_q, H, D) in q's dtype, lse (B, H, T_q) in fp32, or fp64 for fp64.

    Args:
        q: (B, T_q, H, D), k and v: (B, T_k, H_kv, D).
        options: without sinks, dropout and packed blocks; a mask is given by its first two lists.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    keywords = _scores(options) | _masks(options, q, k)
    with torch.no_grad():
        out, lse = standard_attention(*(x.to(dtype) for x in (q, k, v)), **keywords)
    return out.to(q.dtype).contiguous(), lse


@torch.no_grad()
def attn_bwd(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    options: AttentionOptions, grads: Sequence[Tensor],
) -> None:  # fmt: skip
    """Write dq, dk and dv: Algorithm 2 of arXiv 2307.08691, in one tile.

    Args:
        dout: (B, T_q, H, D); dlse: (B, H, T_q), or None.
        q, k, v, options: as in `attn_fwd`.
        out, lse: results of `attn_fwd`, for these keys or for more.
        grads: dq, dk and dv, in the shapes and dtype of q, k and v.
    """
    n_kv_head, group = k.shape[2], q.shape[2] // k.shape[2]
    dtype = lse.dtype
    q, k = q.to(dtype), k.to(dtype)
    Q, dO = (x.to(dtype).transpose(1, 2) for x in (q, dout))  # (B, H, T_q, D)
    K, V = (x.to(dtype).repeat_interleave(group, 2).transpose(1, 2) for x in (k, v))
    S, slope = scores_and_slope(q, k, **_scores(options))
    visible = visible_keys(q.shape[1], k.shape[1], device=q.device, **_masks(options, q, k))
    # A row that sees no key has lse -inf, and -inf - -inf is NaN: subtract 0 there.
    P = torch.exp(S.masked_fill(~visible, -torch.inf) - finite(lse).unsqueeze(-1))
    delta = (out.to(dtype) * dout.to(dtype)).sum(-1).transpose(1, 2)
    if dlse is not None:
        delta = delta - dlse
    dS = P * (dO @ V.mT - delta.unsqueeze(-1)) * slope
    dq, dk, dv = grads
    dq.copy_((dS @ K).transpose(1, 2))
    for grad, x in ((dk, dS.mT @ Q), (dv, P.mT @ dO)):  # (B, H, T_k, D)
        grad.copy_(x.unflatten(1, (n_kv_head, group)).sum(2).transpose(1, 2))


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge attention over other keys, `part` and `part_lse`, into `out` and `lse`, in place.

    With a = exp(lse) and b = exp(part_lse), out becomes (a out + b part) / (a + b). The weight
    b / (a + b) is a sigmoid, which cannot overflow.

    Args:
        out, part: (B, T, H, D).
        lse, part_lse: (B, H, T).
    """
    weight = torch.sigmoid(part_lse - lse)
    # A row that sees no key in either result has -inf - -inf = NaN.
    weight.nan_to_num_(0.0)
    torch.logaddexp(lse, part_lse, out=lse)
    weight = weight.transpose(1, 2).unsqueeze(-1)
    out.copy_(torch.lerp(out.to(weight.dtype), part.to(weight.dtype), weight))


def _scores(options: AttentionOptions) -> dict[str, Any]:
    keywords = options.keywords()
    return {name: keywords[name] for name in SCORE_OPTIONS}


def _masks(options: AttentionOptions, q: Tensor, k: Tensor) -> dict[str, Any]:
    assert options.sinks is None and not options.mask_packed and not options.dropout_p
    return {
        "causal": options.causal,
        "window_size": options.window_size or None,
        "mask": _mask(options, q.shape[1], k.shape[1]),
        "doc_start": options.doc_start,
        "kv_lengths": options.kv_lengths,
    }


def _mask(options: AttentionOptions, seq_q: int, seq_k: int) -> BlockSparseMask | None:
    """Rebuild the mask from the lists in the options, or None."""
    rows, blocks, size = options.mask_rows, options.mask_row_blocks, options.mask_block_size
    if rows is None or blocks is None:
        return None
    layout = torch.zeros(rows.shape[0], -(-seq_q // size), -(-seq_k // size), dtype=torch.bool)
    for head, entries in enumerate(rows.tolist()):
        for row, begin, n_full, n_partial, *_ in entries:
            columns = blocks[begin : begin + n_full + n_partial].long()
            layout[head, row, columns.to(layout.device)] = True
    return BlockSparseMask(layout.to(rows.device), size)
