"""The two passes of attention as the kernels have them, in plain PyTorch, for where none run.

What `kernels.triton.fwd` and `kernels.triton.bwd` offer: the backward pass starts from the output
and the log-sum-exp that it is given, be they of these keys or, as in ring attention, of more.
It holds the whole score matrix, in fp32, or in fp64 for fp64.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..mask.block_mask import BlockSparseMask
from ..options import AttentionOptions
from .standard import finite, standard_attention, visible_keys


def attn_fwd(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """out (B, T_q, H, D) in the dtype of q, and lse (B, H, T_q) in fp32, or fp64 for fp64.

    Args:
        q: (B, T_q, H, D), k and v: (B, T_k, H_kv, D).
        options: of which it serves causal, softmax_scale, softcap, window_size, doc_start,
            kv_lengths and, by its first two lists, a mask.
    """
    _check(options)
    dtype = torch.promote_types(q.dtype, torch.float32)
    with torch.no_grad():
        out, lse = standard_attention(
            *(x.to(dtype) for x in (q, k, v)),
            softmax_scale=options.softmax_scale,
            softcap=options.softcap or None,
            **_masks(options, q, k),
        )
    return out.to(q.dtype).contiguous(), lse


@torch.no_grad()
def attn_bwd(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    options: AttentionOptions,
    grads: Sequence[Tensor],
) -> None:
    """Write dq, dk and dv: Algorithm 2 of arXiv 2307.08691, in one tile.

    Args:
        dout: (B, T_q, H, D); dlse: (B, H, T_q), or None.
        q, k, v: as `attn_fwd` takes them.
        out, lse: as it gives them, of these keys or of more.
        grads: dq, dk and dv, in the shapes and dtype of q, k and v.
    """
    _check(options)
    n_kv_head, group = k.shape[2], q.shape[2] // k.shape[2]
    dtype = lse.dtype
    Q, dO = (x.to(dtype).transpose(1, 2) for x in (q, dout))  # (B, H, T_q, D)
    K, V = (x.to(dtype).repeat_interleave(group, 2).transpose(1, 2) for x in (k, v))
    S = Q @ K.mT * options.softmax_scale
    if options.softcap:
        S = options.softcap * torch.tanh(S / options.softcap)
    visible = visible_keys(q.shape[1], k.shape[1], device=q.device, **_masks(options, q, k))
    # where a row sees no key lse is -inf, and its scores are hidden
    P = torch.exp(S.masked_fill(~visible, -torch.inf) - finite(lse).unsqueeze(-1))
    delta = (out.to(dtype) * dout.to(dtype)).sum(-1).transpose(1, 2)
    if dlse is not None:
        delta = delta - dlse
    dS = P * (dO @ V.mT - delta.unsqueeze(-1))
    if options.softcap:
        dS = dS * (1 - (S / options.softcap).square())
    dS = dS * options.softmax_scale
    of_heads = {"dk": dS.mT @ Q, "dv": P.mT @ dO}  # (B, H, T_k, D)
    dq, *of_keys = grads
    dq.copy_((dS @ K).transpose(1, 2))
    for grad, x in zip(of_keys, of_heads.values(), strict=True):
        grad.copy_(x.unflatten(1, (n_kv_head, group)).sum(2).transpose(1, 2))


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Make attention of some keys that of some more: change `out` and `lse`.

    With a = exp(lse) and b = exp(part_lse), out becomes (a out + b part) / (a + b). The weight
    b / (a + b) is a sigmoid, which overflows nowhere.

    Args:
        out: (B, T, H, D), lse: (B, H, T).
        part, part_lse: the same of the other keys.
    """
    weight = torch.sigmoid(part_lse - lse)
    weight.nan_to_num_(0.0)  # of a row that sees no key: -inf - -inf
    torch.logaddexp(lse, part_lse, out=lse)
    weight = weight.transpose(1, 2).unsqueeze(-1)
    out.copy_(torch.lerp(out.to(weight.dtype), part.to(weight.dtype), weight))


def _masks(options: AttentionOptions, q: Tensor, k: Tensor) -> dict:
    return {
        "causal": options.causal,
        "window_size": options.window_size or None,
        "mask": _mask(options, q.shape[1], k.shape[1]),
        "doc_start": options.doc_start,
        "kv_lengths": options.kv_lengths,
    }


def _mask(options: AttentionOptions, seq_q: int, seq_k: int) -> BlockSparseMask | None:
    """The mask whose lists the options have."""
    rows, blocks, size = options.mask_rows, options.mask_row_blocks, options.mask_block_size
    if rows is None or blocks is None:
        return None
    layout = torch.zeros(rows.shape[0], -(-seq_q // size), -(-seq_k // size), dtype=torch.bool)
    for head, entries in enumerate(rows.tolist()):
        for row, begin, n_full, n_partial, *_ in entries:
            seen = blocks[begin : begin + n_full + n_partial].long()
            layout[head, row, seen.to(layout.device)] = True
    return BlockSparseMask(layout.to(rows.device), size)


def _check(options: AttentionOptions) -> None:
    assert options.sinks is None and not options.mask_packed and not options.dropout_p
