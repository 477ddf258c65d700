"""`flash_attention`, the one public function: it checks the call and picks who computes it."""

import importlib.util
import math
import os
from typing import Literal, Unpack, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.block_mask import BlockSparseMask
from kernels.checks import (
    MAX_ROW_STRIDE,
    check_dropout_seed,
    check_numbers,
    check_qkv,
    check_side_tensors,
    rows_in_reach,
)
from kernels.ops import attention
from kernels.options import MASKED_LOOP, UNMASKED_LOOP, AttentionOptions
from kernels.reference import AttentionArguments, standard_attention
from kernels.unfused import unfused_attention

IMPLS = ("triton", "sdpa", "reference", "unfused")

# Both are read once: Triton itself looks at TRITON_INTERPRET when a kernel is defined, and
# torch.compile can trace neither look-up.
_HAS_TRITON = importlib.util.find_spec("triton") is not None
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class _Keywords(AttentionArguments, total=False):
    deterministic: bool
    impl: str | None


@overload
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = False,
    **keywords: Unpack[_Keywords],
) -> Tensor: ...


@overload
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[True],
    **keywords: Unpack[_Keywords],
) -> tuple[Tensor, Tensor]: ...


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: int | None = None,
    mask: BlockSparseMask | None = None,
    doc_start: Tensor | None = None,
    kv_lengths: Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | int | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    impl: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(q k^T * softmax_scale) v, exact, in memory linear in the sequence length.

    Query i stands at key position p = i + T_k - T_q: masks align at the bottom right. With
    T_q = 2, T_k = 4 and with T_q = 4, T_k = 2, a causal mask shows (1 is seen):

        1 1 1 0         0 0
        1 1 1 1         0 0
                        1 0
                        1 1

    A key is seen where all of causal, window_size, mask, doc_start and kv_lengths allow it. A row
    that sees no key has output 0, lse -inf (its sink, if there are sinks) and gradients 0.

    Args:
        q: (B, T_q, H, D), fp16, bf16 or fp32, D up to 256; any strides with a contiguous last
            dimension, that of T up to 2^24 elements for impl="triton".
        k, v: (B, T_k, H_kv, D), same dtype and device. H is a multiple of H_kv: head h reads
            key-value head h // (H / H_kv) (grouped-query attention).
        causal: hide from each query the keys that come after it, j > p.
        softmax_scale: positive; default 1 / sqrt(D).
        window_size: W >= 1 hides the keys with |p - j| >= W. With causal, a query sees W keys,
            itself included; without, W - 1 on either side of itself.
        mask: block-sparse; its layout covers ceil(T_q / block) x ceil(T_k / block) blocks.
        doc_start: (B, T_q) int32 or int64, the key position at which each query's document begins:
            it sees no key before that (packed documents).
        kv_lengths: (B,) int32 or int64, the number of keys that are not padding. Keys from there on
            are hidden; positions still count from T_k.
        sinks: (H,), any floating dtype: a score for each head that takes part in the softmax and
            has no value (arXiv 2309.17453; learnable as in gpt-oss). lse counts it.
        softcap: c > 0 replaces a score s by c * tanh(s / c) (Gemma 2, arXiv 2408.00118).
        dropout_p: probability, in [0, 1), with which an attention weight is set to zero; the
            others are divided by 1 - dropout_p.
        dropout_seed: int64 tensor with one element on the device of q, or an int; in [0, 2^63).
            What is dropped is a pure function of (seed, batch, head, query, key), the same in
            every implementation but "sdpa" and "unfused", which draw from PyTorch's generator and
            take no seed.
        return_lse: also return the log-sum-exp of each row of scores, which has a gradient too.
        deterministic: promise that a repeated call gives the same bits, gradients included. All
            implementations but "sdpa" and "unfused" always do.
        impl: "triton" (this project's kernels), "sdpa" (PyTorch's
            scaled_dot_product_attention), "reference" (standard attention, exact, quadratic
            memory), "unfused" (standard attention in the dtype of q, to compare speed with). None
            picks the fastest that serves the call. A named one that cannot serve it raises.

    Returns:
        out (B, T_q, H, D) in the dtype of q; with return_lse also lse (B, H, T_q), fp32, natural
        logarithm.

    Raises:
        ValueError: an argument is malformed, or the named impl cannot serve the call.

    Source: FlashAttention (arXiv 2205.14135) and FlashAttention-2 (arXiv 2307.08691).
    """
    check_qkv(q, k, v)
    check_numbers(softmax_scale, window_size, softcap, dropout_p)
    check_side_tensors(q, mask, doc_start, kv_lengths, sinks)
    check_dropout_seed(dropout_seed, q)
    softmax_scale = softmax_scale or 1.0 / math.sqrt(q.shape[-1])
    neither_sdpa_nor_unfused = {
        "window_size": window_size is not None,
        "mask": mask is not None,
        "doc_start": doc_start is not None,
        "sinks": sinks is not None,
        "softcap": softcap is not None,
        "dropout_seed": dropout_seed is not None and dropout_p > 0,
        "return_lse=True": return_lse,
        "deterministic=True": deterministic and q.device.type != "cpu",
    }
    not_sdpa = neither_sdpa_nor_unfused | {
        "causal with T_q != T_k": causal and q.shape[1] != k.shape[1],
        "kv_lengths": kv_lengths is not None,
    }
    not_unfused = neither_sdpa_nor_unfused | {
        "fewer heads in k than in q": q.shape[2] != k.shape[2],
        "causal with T_q > T_k": causal and q.shape[1] > k.shape[1],  # rows that see no key
    }
    impl = _pick(
        impl,
        {
            "triton": _triton_obstacle(q, k, v),
            "sdpa": _unsupported(not_sdpa),
            "reference": None,
            "unfused": _unsupported(not_unfused),
        },
        q.device,
    )
    if impl == "sdpa":
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            dropout_p=dropout_p,
            is_causal=causal,
            scale=softmax_scale,
            enable_gqa=q.shape[2] != k.shape[2],
        )
        return out.transpose(1, 2)
    if impl == "unfused":
        return unfused_attention(
            q,
            k,
            v,
            causal=causal,
            softmax_scale=softmax_scale,
            kv_lengths=kv_lengths,
            dropout_p=dropout_p,
        )

    if dropout_p == 0:
        dropout_seed = None
    elif dropout_seed is None:
        raise ValueError(
            f"dropout_p={dropout_p} with impl={impl!r} needs dropout_seed: pass an int, or an "
            "int64 tensor with one element on the device of q"
        )
    elif not isinstance(dropout_seed, Tensor):
        # Filled on the device: a copy from the host would make the CPU wait for the GPU.
        dropout_seed = torch.full((1,), dropout_seed, dtype=torch.int64, device=q.device)

    if impl == "reference":
        out, lse = standard_attention(
            q,
            k,
            v,
            causal=causal,
            softmax_scale=softmax_scale,
            window_size=window_size,
            mask=mask,
            doc_start=doc_start,
            kv_lengths=kv_lengths,
            sinks=sinks,
            softcap=softcap,
            dropout_p=dropout_p,
            dropout_seed=dropout_seed,
        )
    else:
        if window_size is not None and window_size >= max(q.shape[1], k.shape[1]):
            window_size = None  # no key is that far from any query
        options = AttentionOptions(
            dropout_seed=dropout_seed,
            doc_start=None if doc_start is None else doc_start.to(torch.int32).contiguous(),
            kv_lengths=None if kv_lengths is None else kv_lengths.to(torch.int32).contiguous(),
            sinks=None if sinks is None else sinks.to(torch.float32).contiguous(),
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=window_size or 0,
            softcap=softcap or 0.0,
            dropout_p=dropout_p,
        )
        if mask is not None:
            options = with_mask(options, mask, q, k)
        out, lse = attention(q, k, v, impl, options)
    return (out, lse) if return_lse else out


def with_mask(
    options: AttentionOptions, mask: BlockSparseMask, q: Tensor, k: Tensor
) -> AttentionOptions:
    """`options` with the lists of `mask` for q (B, T_q, H, D) and k (B, T_k, H_kv, D)."""
    lists = mask.lists(
        q.shape[1],
        k.shape[1],
        causal=options.causal,
        window_size=options.window_size or None,
        all_partial=options.doc_start is not None or options.kv_lengths is not None,
        # The heads of a group share a program, and so the order of its columns.
        longest_column_first=mask.n_head == 1 or q.shape[2] == k.shape[2],
        device=q.device,
    )
    return options._replace(
        mask_rows=lists.rows,
        mask_row_blocks=lists.row_blocks,
        mask_cols=lists.cols,
        mask_col_blocks=lists.col_blocks,
        mask_block_size=mask.block_size,
        mask_loops=(UNMASKED_LOOP if lists.n_full else 0) | (MASKED_LOOP if lists.n_partial else 0),
    )


def _pick(impl: str | None, obstacles: dict[str, str | None], device: torch.device) -> str:
    """The implementation to use: the one asked for if it can serve the call, or the fastest."""
    if impl is not None and impl not in IMPLS:
        raise ValueError(f"impl must be None or one of {IMPLS}, got {impl!r}")
    if impl is None:
        # Interpreted kernels are right, but far too slow to be picked.
        candidates = IMPLS if device.type == "cuda" else ("sdpa", "reference")
        return next(name for name in candidates if obstacles[name] is None)
    if obstacles[impl] is not None:
        raise ValueError(
            f"impl={impl!r} cannot serve this call: {obstacles[impl]}. "
            "impl=None picks an implementation that can"
        )
    return impl


def _unsupported(needs: dict[str, bool]) -> str | None:
    return next((f"it does not support {name}" for name, on in needs.items() if on), None)


def _triton_obstacle(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    if not _HAS_TRITON:
        return "the package triton is not installed"
    if q.dtype == torch.float64:
        return "it computes in fp32, and q is float64"
    if q.device.type != "cuda" and not _INTERPRETED:
        return f"q is on {q.device}, and it needs a CUDA GPU (or TRITON_INTERPRET=1, for tests)"
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not rows_in_reach(tensor):
            return (
                f"it takes rows at most {MAX_ROW_STRIDE} elements apart, and {name} has shape "
                f"{tuple(tensor.shape)} and strides {tensor.stride()}: call .contiguous() on it"
            )
    return None
