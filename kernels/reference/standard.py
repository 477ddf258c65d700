"""Specification of attention and of its dropout mask, in plain PyTorch.

Tests compare every kernel with `standard_attention`. It is differentiable and computes in the dtype
of its inputs: fp64 inputs give the exact result, bf16 inputs the error that a bf16 kernel may have.
The tiled algorithms of the papers are in tiled.py.

Letters in shapes: B batch, T_q queries, T_k keys, H query heads, H_kv key and value heads,
D head_dim.
"""

import math

import torch
from torch import Tensor

from ..mask.block_mask import BlockSparseMask

_GOLDEN = 0x9E3779B9  # 2^32 / golden ratio: an odd stride that visits all 2^32 counters
_SALT = 0x85EBCA6B  # distinguishes the two halves of the seed
# Multipliers of the four elements of a group, by bit 3 of query and key; the first is lowbias32's.
_LAST_MULTIPLIERS = ((0x846CA68B, 0x915F77F5), (0x93D765DD, 0xADB4A92D))
_LOW_32_BITS = 0xFFFFFFFF


def standard_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, softmax_scale: float | None = None,
    window_size: int | None = None, mask: BlockSparseMask | None = None,
    doc_start: Tensor | None = None, kv_lengths: Tensor | None = None, sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None, softcap: float | None = None, dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None, first_query: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention with the whole score matrix in memory: Algorithm 0 of arXiv 2205.14135.

    S = softmax_scale * Q K^T,  P = softmax(S),  O = dropout(P) V,  lse = log(sum(exp(S))).

    The arguments are those of `kernels.flash_attention`; `visible_keys` defines the masks. A row
    that sees no key has out 0, lse -inf and gradients 0. All results are differentiable.

    Args:
        q: (B, T_q, H, D), any floating dtype.
        k, v: (B, T_k, H_kv, D). H is a multiple of H_kv; head h reads kv head h // (H // H_kv).
        softmax_scale: factor on the scores; 1 / sqrt(D) when None.
        sinks: (H,) scores; each adds a key with value zero to the softmax of every row of a head.
        alibi_slopes: (H,); S also has -slope * |p - j|, for key j and a query at key position p.
        softcap: c turns S into c * tanh(S / c).
        dropout_p: probability in [0, 1) that an entry of P is set to 0; the kept ones are
            multiplied by 1 / (1 - dropout_p). lse does not depend on dropout.
        dropout_seed: as in `dropout_keep_mask`; needed iff dropout_p > 0.
        first_query: number of the first query in its sequence, for dropout.

    Returns:
        out: (B, T_q, H, D) in q's dtype.
        lse: (B, H, T_q), natural logarithm, in fp32, or fp64 for fp64 inputs.

    Raises:
        ValueError: the shapes do not match, or dropout_p has no seed.
    """
    check_shapes(q, k, v)
    values = v.repeat_interleave(q.shape[2] // k.shape[2], dim=2).transpose(1, 2)
    scores, _ = scores_and_slope(q, k, softmax_scale=softmax_scale, softcap=softcap)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.to(scores.dtype)[:, None, None] * _distances(q, k)
    visible = visible_keys(
        q.shape[1], k.shape[1], causal=causal, window_size=window_size, mask=mask,
        doc_start=doc_start, kv_lengths=kv_lengths, device=q.device,
    )  # fmt: skip
    scores = scores.masked_fill(~visible, -math.inf)

    lse = scores.logsumexp(dim=-1)
    if sinks is not None:
        lse = _add_sinks(lse, sinks)
    # exp(-inf - pivot) is 0 with a finite pivot; with the lse of an empty row it would be NaN.
    p = torch.exp(scores - finite(lse).unsqueeze(-1)).to(q.dtype)
    p = p * dropout_factor(q, k, dropout_p, dropout_seed, first_query).to(p.dtype)
    out = (p @ values).transpose(1, 2)
    return out.to(q.dtype), lse  # autocast may have changed the dtype of out


def scores_and_slope(
    q: Tensor, k: Tensor, *, softmax_scale: float | None = None, softcap: float | None = None
) -> tuple[Tensor, Tensor | float]:
    """Scores of all queries and keys, and their derivative with respect to q k^T.

    Returns:
        (B, H, T_q, T_k) in fp32, or fp64 for fp64, without a mask; and a factor for each of them.
    """
    if softmax_scale is None:
        softmax_scale = 1 / math.sqrt(q.shape[-1])
    keys = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2).transpose(1, 2)  # (B, H, T_k, D)
    # Scale q, because unscaled scores can overflow. In fp16 even scaled scores can, above 65,504.
    scaled = (q * softmax_scale).transpose(1, 2)
    if q.dtype == torch.float16:
        scaled, keys = scaled.float(), keys.float()
    scores = (scaled @ keys.mT).to(torch.promote_types(q.dtype, torch.float32))
    if softcap is None:
        return scores, softmax_scale
    scores = softcap * torch.tanh(scores / softcap)
    return scores, softmax_scale * (1 - (scores / softcap).square())


def visible_keys(
    seq_q: int, seq_k: int, *, causal: bool = False, window_size: int | None = None,
    mask: BlockSparseMask | None = None, doc_start: Tensor | None = None,
    kv_lengths: Tensor | None = None, device: torch.device | str | None = None,
) -> Tensor:  # fmt: skip
    """Boolean mask of the keys that each query sees: those that all arguments allow.

    The key position of query i is p = i + T_k - T_q. A causal mask with T_q = 2, T_k = 4 and with
    T_q = 4, T_k = 2, and a window of 2 with T = 4 (1 is visible):

        1 1 1 0         0 0         1 1 0 0
        1 1 1 1         0 0         1 1 1 0
                        1 0         0 1 1 1
                        1 1         0 0 1 1

    Args:
        seq_q, seq_k: T_q and T_k.
        causal: j <= p.
        window_size: |p - j| < window_size.
        mask: its layout, expanded to elements.
        doc_start: (B, T_q) integers, j >= doc_start of the query.
        kv_lengths: (B,) integers, j < kv_lengths.

    Returns:
        Bool, (B or 1, H or 1, T_q, T_k).
    """
    position = torch.arange(seq_q, device=device).unsqueeze(-1) + (seq_k - seq_q)
    key = torch.arange(seq_k, device=device)
    visible = torch.ones(1, 1, seq_q, seq_k, dtype=torch.bool, device=device)
    if causal:
        visible = visible & (key <= position)
    if window_size is not None:
        visible = visible & ((position - key).abs() < window_size)
    if mask is not None:
        visible = visible & mask.to_dense(seq_q, seq_k).to(visible.device)
    if doc_start is not None:
        visible = visible & (key >= doc_start[:, None, :, None])
    if kv_lengths is not None:
        visible = visible & (key < kv_lengths[:, None, None, None])
    return visible


def _distances(q: Tensor, k: Tensor) -> Tensor:
    """Distance of each query from each key, |p - j|: (T_q, T_k) int64."""
    position = torch.arange(q.shape[1], device=q.device) + k.shape[1] - q.shape[1]
    return (position[:, None] - torch.arange(k.shape[1], device=q.device)).abs()


def dropout_keep_mask(
    seed: int | Tensor, *, batch: int, n_head: int, seq_q: int, seq_k: int, dropout_p: float,
    first_query: int = 0, device: torch.device | str | None = None,
) -> Tensor:  # fmt: skip
    """Mask of the probabilities that dropout keeps: a pure function of (seed, b, h, query, key).

    Every kernel computes the same function. So the mask is the same in dense and sparse attention,
    recomputed in the backward pass, or split over GPUs. All arithmetic is modulo 2^32; `mix` is
    lowbias32 by Chris Wellons (https://nullprogram.com/blog/2018/07/31/).

        head_key = mix((mix(seed_lo) ^ mix(seed_hi ^ 0x85EBCA6B)) + 0x9E3779B9 * (b * n_head + h))
        row_key  = stir(head_key + 0x9E3779B9 * (query & ~8))
        x        = stir(row_key ^ 0x9E3779B9 * (key & ~8))
        keep     = (x ^ x >> 15) * M[query >> 3 & 1][key >> 3 & 1] >= int(dropout_p * 2^32)

    where stir(x) = (x ^ x >> 16) * 0x7FEB352D is the first step of `mix`. Four elements whose query
    and key differ only in bit 3 share x, so a kernel computes one hash for them. The four odd
    multipliers M turn it into four values, each uniform, and independent as far as
    tests/kernels/reference/test_standard.py can detect.

    Args:
        seed: an integer in [0, 2^63), or an int64 tensor with one element. The value of a tensor is
            not checked: that would synchronize with the GPU, and torch.compile could not trace it.
        n_head: of q.
        dropout_p: probability in [0, 1) that an entry is dropped.
        first_query: number of the first query, if the queries are part of a sequence.

    Returns:
        (batch, n_head, seq_q, seq_k) bool.

    Raises:
        ValueError: seed, an integer, or dropout_p is out of range.
    """
    if isinstance(seed, int) and not 0 <= seed < 2**63:
        raise ValueError(f"seed must be in [0, 2**63), got {seed}")
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p must be in [0, 1), got {dropout_p}")
    seed = torch.as_tensor(seed, dtype=torch.int64, device=device).reshape(())
    seed_key = _mix(seed) ^ _mix((seed >> 32) ^ _SALT)  # `_mix` takes the low 32 bits of each
    head, query, key = (torch.arange(n, device=device) for n in (batch * n_head, seq_q, seq_k))
    head_key = _mix(seed_key + _GOLDEN * head).view(batch, n_head, 1)
    query = query + first_query
    row_key = _stir(head_key + _GOLDEN * (query & ~8))  # (B, H, T_q)
    x = _stir(row_key.unsqueeze(-1) ^ (_GOLDEN * (key & ~8)))
    multipliers = torch.tensor(_LAST_MULTIPLIERS, device=device)
    multiplier = multipliers[(query >> 3 & 1).unsqueeze(-1), key >> 3 & 1]  # (T_q, T_k)
    return (x ^ (x >> 15)) * multiplier & _LOW_32_BITS >= int(dropout_p * 2**32)


def _stir(x: Tensor) -> Tensor:
    """First step of `_mix`, a bijection of 32 bits.

    In int64, because torch lacks most uint32 operations. A product may wrap around 2^64, which
    keeps its low 32 bits correct; masking them makes the next shift a logical one.
    """
    x = x & _LOW_32_BITS
    return ((x ^ (x >> 16)) * 0x7FEB352D) & _LOW_32_BITS


def _mix(x: Tensor) -> Tensor:
    """Hash of 32 bits, lowbias32, which is a bijection."""
    x = _stir(x)
    x = ((x ^ (x >> 15)) * _LAST_MULTIPLIERS[0][0]) & _LOW_32_BITS
    return x ^ (x >> 16)


def dropout_factor(
    q: Tensor, k: Tensor, dropout_p: float, seed: int | Tensor | None, first_query: int = 0
) -> Tensor:
    """Dropout factors on P, (B, H, T_q, T_k): 0 if dropped, 1 / (1 - dropout_p) if kept."""
    B, T_q, H, _ = q.shape
    T_k = k.shape[1]
    dtype = torch.promote_types(q.dtype, torch.float32)
    if dropout_p == 0:
        return torch.ones((), dtype=dtype, device=q.device).expand(B, H, T_q, T_k)
    if seed is None:
        raise ValueError(f"dropout_p={dropout_p} needs a dropout_seed, got None")
    keep = dropout_keep_mask(
        seed, batch=B, n_head=H, seq_q=T_q, seq_k=T_k, dropout_p=dropout_p,
        first_query=first_query, device=q.device,
    )  # fmt: skip
    return keep.to(dtype) / (1 - dropout_p)


def _add_sinks(lse: Tensor, sinks: Tensor) -> Tensor:
    """log(exp(lse) + exp(sinks)) for lse (B, H, T_q) and sinks (H,).

    Where both are -inf, the result is a constant -inf, because the gradient of logaddexp is NaN.
    """
    sinks = sinks.to(lse.dtype)[:, None].expand_as(lse)
    is_empty = (lse == -math.inf) & (sinks == -math.inf)
    added = torch.logaddexp(lse.masked_fill(is_empty, 0.0), sinks.masked_fill(is_empty, 0.0))
    return added.masked_fill(is_empty, -math.inf)


def finite(x: Tensor) -> Tensor:
    """x with its -inf replaced by 0, so that it can be subtracted from -inf."""
    return x.masked_fill(x == -math.inf, 0.0)


def check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError if the shapes of k and v do not match q."""
    B, _, H, D = q.shape
    _, T_k, H_kv, _ = k.shape
    if k.shape != v.shape or k.shape != (B, T_k, H_kv, D) or H % H_kv != 0:
        raise ValueError(
            f"q {tuple(q.shape)} needs k and v of one shape ({B}, T_k, H_kv, {D}) "
            f"with H_kv dividing {H}, got k {tuple(k.shape)} and v {tuple(v.shape)}"
        )
