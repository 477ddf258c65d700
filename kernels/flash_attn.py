"""flash-attn's functions on Papilio's kernels: code that calls them only changes its import.

    from papilio.flash_attn import flash_attn_func, flash_attn_varlen_func

Signatures and semantics are those of flash-attn 2.8 (flash_attn_interface.py). Arguments that the
kernels lack are refused by name.
"""

from typing import Any

from torch import Tensor

from .argument_types import check_bool, check_tensors, is_whole_number
from .attention import flash_attention
from .varlen import Sequences, check_cu_seqlens

Window = tuple[int | None, int | None]
"""Keys that a query sees (before, after) its own position; -1 or None: all."""


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor:  # fmt: skip
    """Attention, softmax(q k^T * softmax_scale) v, with flash-attn's arguments.

    Args:
        q: (B, T_q, H, D), fp16, bf16 or fp32, D up to 256.
        k, v: (B, T_k, H_kv, D); H must be a multiple of H_kv.
        dropout_p: probability of setting an attention weight to zero.
        softmax_scale: default 1 / sqrt(D).
        causal: hide later keys. Aligned at the bottom right if T_q != T_k.
        window_size: (left, right): query i sees keys p - left to p + right, p = i + T_k - T_q; -1
            or None: no limit. Supported: causal with any left, (left, 0), and left == right.
        softcap: c > 0 replaces a score s by c * tanh(s / c).
        alibi_slopes: (H,): adds -slope * |p - j| to the score of key j. Not with softcap.
        deterministic: always the case, without a cost.
        return_attn_probs: must be False, because the weights are never formed.

    Returns:
        out (B, T_q, H, D).

    Raises:
        ValueError: an argument is malformed or not supported.
    """
    _refuse(return_attn_probs=return_attn_probs)
    check_tensors(q=q, k=k)
    longest = max(q.shape[1], k.shape[1]) if q.dim() == k.dim() == 4 else 0
    causal, keys = convert_window(window_size, longest, causal=causal)
    return flash_attention(
        q, k, v, causal=causal, window_size=keys, softmax_scale=softmax_scale,
        alibi_slopes=alibi_slopes, softcap=softcap or None, dropout_p=dropout_p,
        deterministic=deterministic,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, block_table: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention of sequences of different lengths in one tensor, with flash-attn's arguments.

    Sequence i is rows cu_seqlens[i] to cu_seqlens[i + 1]; queries see keys of their own sequence.
    Causal self-attention copies nothing: pass one tensor as both cu_seqlens. Other calls copy q, k
    and v to a batch of max_seqlen tokens each.

    Args:
        q: (tokens, H, D), fp16, bf16 or fp32, D up to 256.
        k, v: (tokens of keys, H_kv, D); H must be a multiple of H_kv.
        cu_seqlens_q, cu_seqlens_k: (sequences + 1,) int32, from 0: the number of tokens before each
            sequence, and the total. Results of tokens after the last sequence are undefined.
        max_seqlen_q, max_seqlen_k: at least the length of the longest sequence. On a GPU neither
            these nor the values of cu_seqlens are checked: that would wait for it.
        block_table: must be None, because the cache of keys is never paged.
        others: as in `flash_attn_func`, with T_q and T_k those of each sequence.

    Returns:
        out (tokens, H, D).

    Raises:
        ValueError: an argument is malformed or not supported.
    """
    _refuse(return_attn_probs=return_attn_probs, block_table=block_table)
    check_tensors(q=q, k=k, v=v)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 3:
            raise ValueError(f"{name} must be (tokens, H, D), got shape {tuple(tensor.shape)}")
    if k.shape != v.shape or q.shape[2] != k.shape[2]:
        raise ValueError(
            "k and v must have one shape, and the head_dim of q: "
            f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    check_cu_seqlens("q", cu_seqlens_q, max_seqlen_q, q)
    check_cu_seqlens("k", cu_seqlens_k, max_seqlen_k, k)
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            "cu_seqlens_q and cu_seqlens_k must describe the same sequences, got "
            f"{len(cu_seqlens_q) - 1} and {len(cu_seqlens_k) - 1} of them"
        )
    longest = max(max_seqlen_q, max_seqlen_k)
    causal, keys = convert_window(window_size, longest, causal=causal)
    sequences = Sequences(
        cu_seqlens_q, cu_seqlens_k, q.shape[0], k.shape[0], max_seqlen_q, max_seqlen_k,
        causal=causal,
    )  # fmt: skip
    q, k, v, doc_start, kv_lengths = sequences.batch(q, k, v)
    out = flash_attention(
        q, k, v, causal=causal, window_size=keys, doc_start=doc_start, kv_lengths=kv_lengths,
        softmax_scale=softmax_scale, alibi_slopes=alibi_slopes, softcap=softcap or None,
        dropout_p=dropout_p, deterministic=deterministic,
    )  # fmt: skip
    return sequences.tokens(out)


def convert_window(window_size: Window, longest: int, *, causal: bool) -> tuple[bool, int | None]:
    """Convert flash-attn's window to `causal` and `window_size` of `flash_attention`.

    Args:
        window_size: (left, right) of keys before and after a query's position; -1 or None: all.
        longest: number of queries or keys, whichever is larger: a side that long hides nothing.
        causal: hides all later keys, whatever the right side is.

    Raises:
        ValueError: the window is malformed, or its sides differ.
    """
    check_bool("causal", causal)
    sides = list(window_size) if isinstance(window_size, (tuple, list)) else []
    if len(sides) != 2 or not all(map(_is_side, sides)):
        raise ValueError(
            "window_size must be (left, right), the keys before and after a query's position, with "
            f"-1 for all, got {window_size!r}"
        )
    left, right = (-1 if side is None or side >= longest else side for side in sides)
    if causal or right == 0:
        return True, None if left < 0 else left + 1
    if left != right:
        raise ValueError(
            f"window_size={tuple(window_size)} must have equal sides, or right=0 or causal=True: "
            "use PyTorch's FlexAttention for other windows"
        )
    return False, None if left < 0 else left + 1


def _is_side(side: Any) -> bool:
    return side is None or (is_whole_number(side) and side >= -1)


def _refuse(**arguments: Any) -> None:
    """Refuse flash-attn's arguments that the kernels lack.

    Raises:
        ValueError: one of them is neither None nor False.
    """
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise ValueError(f"{name} is not supported{_INSTEAD[name]}")


_INSTEAD = {
    "return_attn_probs": (
        ", because the weights are never formed. For the log-sum-exp of the scores, call "
        "papilio.kernels.flash_attention(..., return_lse=True)"
    ),
    "block_table": ": pass keys and values in one tensor, without pages",
}
