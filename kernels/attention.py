"""`flash_attention`, and the same of a packed tensor: check the call and pick who computes it."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Literal, Unpack, overload

import torch
from torch import Tensor

from . import hopper, triton
from .argument_types import check_tensors, plain_bool
from .autocast import in_autocast_dtype
from .call import AttentionArguments, AttentionCall
from .checks import (
    check_bools,
    check_dropout_seed,
    check_keywords,
    check_numbers,
    check_qkv,
    check_side_tensors,
)
from .mask.block_mask import BlockSparseMask
from .ops import IMPLEMENTATIONS, attention
from .options import make_options
from .reference import eager, sdpa, standard

# By name, what stands in the way of each implementation; the fastest first.
OBSTACLES: dict[str, Callable[[AttentionCall], str | None]] = {
    "hopper": hopper.obstacle,
    "triton": triton.obstacle,
    "sdpa": sdpa.obstacle,
    "reference": lambda call: None,
    "unfused": eager.obstacle,
}
IMPLS = tuple(OBSTACLES)


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
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **keywords: Unpack[_Keywords]
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

    Under autocast q, k and v are cast to its dtype, as PyTorch's scaled_dot_product_attention
    casts them; their dtypes may differ before that.

    Hidden keys and values must be finite, zero say: what is hidden has a weight of 0, and 0 * NaN
    is NaN. Which of them are multiplied at all depends on the implementation.

    Args:
        q: (B, T_q, H, D), fp16, bf16 or fp32, D up to 256; any strides with a contiguous last
            dimension, that of T up to 2^24 elements for impl="triton".
        k, v: (B, T_k, H_kv, D), same dtype and device. H is a multiple of H_kv: head h reads
            key-value head h // (H / H_kv) (grouped-query attention).
        causal: hide from each query the keys that come after it, j > p.
        softmax_scale: positive and finite; default 1 / sqrt(D).
        window_size: W >= 1 hides the keys with |p - j| >= W. With causal, a query sees W keys,
            itself included; without, W - 1 on either side of itself.
        mask: block-sparse; its layout covers ceil(T_q / block) x ceil(T_k / block) blocks.
        doc_start: (B, T_q) int32 or int64, the key position at which each query's document begins:
            it sees no key before that (packed documents).
        kv_lengths: (B,) int32 or int64, the number of keys that are not padding. Keys from there on
            are hidden; positions still count from T_k.
        sinks: (H,), any floating dtype: a score for each head that takes part in the softmax and
            has no value (arXiv 2309.17453; learnable as in gpt-oss), below +inf. lse counts it.
        softcap: c > 0 replaces a score s by c * tanh(s / c) (Gemma 2, arXiv 2408.00118).
        dropout_p: probability, in [0, 1), with which an attention weight is set to zero; the
            others are divided by 1 - dropout_p.
        dropout_seed: int64 tensor with one element on the device of q, or an int; in [0, 2^63).
            What is dropped is a pure function of (seed, batch, head, query, key), the same in
            every implementation but "sdpa" and "unfused", which take no seed. None draws from
            PyTorch's generator of the device, in every implementation.
        return_lse: also return the log-sum-exp of each row of scores, which has a gradient too.
        deterministic: promise that a repeated call gives the same bits, gradients included. All
            implementations but "sdpa" and "unfused" always do; dropout needs the same seed, or the
            same state of the generator. It is a promise for calls of the same shape: in a batch of
            another size, out of a sequence has the same bits, and its gradients may differ by
            rounding (impl="hopper", causal, without a mask).
        impl: "hopper" (this project's kernels for H100 and H200), "triton" (its portable ones),
            "sdpa" (PyTorch's scaled_dot_product_attention), "reference" (standard attention, exact,
            quadratic memory), "unfused" (standard attention in the dtype of q, to compare speed
            with). None picks the fastest that serves the call. A named one that cannot serve it
            raises.

    Returns:
        out (B, T_q, H, D) in the dtype of q, or that of autocast; with return_lse also lse
        (B, H, T_q), fp32, natural logarithm.

    Raises:
        ValueError: an argument is malformed, or the named impl cannot serve the call.

    Source: FlashAttention (arXiv 2205.14135) and FlashAttention-2 (arXiv 2307.08691).
    """
    call = checked_call(
        q,
        k,
        v,
        return_lse=return_lse,
        deterministic=deterministic,
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
    out, lse = _compute(call, _pick(impl, call), (call.q, call.k, call.v))
    if not return_lse:
        return out
    assert lse is not None  # who has none refuses return_lse
    return out, lse


@overload
def flash_attention_packed(
    qkv: Tensor, *, return_lse: Literal[False] = False, **keywords: Unpack[_Keywords]
) -> Tensor: ...


@overload
def flash_attention_packed(
    qkv: Tensor, *, return_lse: Literal[True], **keywords: Unpack[_Keywords]
) -> tuple[Tensor, Tensor]: ...


def flash_attention_packed(
    qkv: Tensor,
    *,
    return_lse: bool = False,
    deterministic: bool = False,
    impl: str | None = None,
    **arguments: Unpack[AttentionArguments],
) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_attention` of q, k and v in one tensor, as one linear layer makes them.

    Its gradient is one tensor, too, that the backward pass writes as it is: of three, autograd
    would make one by a copy.

    Args:
        qkv: (B, T, 3, H, D); q, k and v are qkv[:, :, 0] to qkv[:, :, 2].
        return_lse, deterministic, impl, arguments: as of `flash_attention`.

    Returns:
        out (B, T, H, D) in the dtype of qkv, or that of autocast; with return_lse also lse
        (B, H, T), fp32, natural logarithm.

    Raises:
        ValueError: an argument is malformed, or the named impl cannot serve the call.
    """
    check_keywords("flash_attention_packed", arguments)
    check_tensors(qkv=qkv)
    if qkv.dim() != 5 or qkv.shape[2] != 3:
        raise ValueError(f"qkv must be (B, T, 3, H, D), got shape {tuple(qkv.shape)}")
    qkv = in_autocast_dtype(qkv)  # one tensor, whose gradient is one too
    q, k, v = qkv.unbind(2)
    call = checked_call(q, k, v, return_lse=return_lse, deterministic=deterministic, **arguments)
    impl = _pick(impl, call)
    out, lse = _compute(call, impl, (qkv,) if impl in IMPLEMENTATIONS else (q, k, v))
    if not return_lse:
        return out
    assert lse is not None  # who has none refuses return_lse
    return out, lse


def chunk_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    first_query: int,
    impl: str | None = None,
    deterministic: bool = False,
    **arguments: Unpack[AttentionArguments],
) -> Tensor:
    """`flash_attention` of the queries from `first_query` on and the keys from the first one on.

    It drops what attention of the whole sequence drops.

    Args:
        first_query: with dropout a multiple of 16.
    """
    call = checked_call(q, k, v, deterministic=deterministic, **arguments)
    assert first_query % 16 == 0 or not arguments.get("dropout_p"), first_query
    call = call._replace(first_query=first_query)
    return _compute(call, _pick(impl, call), (call.q, call.k, call.v))[0]


def pick_with_lse(impl: str | None, call: AttentionCall) -> str:
    """The implementation to use for a call that needs the lse, as to add up attention of parts."""
    return _pick(impl, call._replace(return_lse=True))


def checked_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: bool = False,
    deterministic: bool = False,
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
) -> AttentionCall:
    """The checked call, with the defaults of `flash_attention`, and q, k and v as autocast casts
    them."""
    check_bools(causal, return_lse, deterministic)
    check_tensors(q=q, k=k, v=v)
    q, k, v = in_autocast_dtype(q), in_autocast_dtype(k), in_autocast_dtype(v)
    check_qkv(q, k, v)
    check_numbers(softmax_scale, window_size, softcap, dropout_p)
    check_side_tensors(q, mask, doc_start, kv_lengths, sinks)
    check_dropout_seed(dropout_seed, q)
    arguments: AttentionArguments = {
        "causal": plain_bool(causal),
        "softmax_scale": softmax_scale,
        "window_size": window_size,
        "mask": mask,
        "doc_start": doc_start,
        "kv_lengths": kv_lengths,
        "sinks": sinks,
        "softcap": softcap,
        "dropout_p": dropout_p,
        "dropout_seed": dropout_seed if dropout_p > 0 else None,
    }
    return AttentionCall(q, k, v, arguments, return_lse, deterministic)


def _compute(
    call: AttentionCall, impl: str, inputs: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor | None]:
    """out and, of who has it, lse; `inputs` are what autograd is to see: q, k and v, or qkv."""
    if impl == "sdpa":
        return sdpa.sdpa_attention(call)
    if impl == "unfused":
        return eager.eager_attention(call)
    if impl == "reference":
        options = call.seeded()
        # Autocast would narrow its wider products. Meta tensors have no autocast to turn off.
        q = call.q
        with nullcontext() if q.is_meta else torch.autocast(q.device.type, enabled=False):
            return standard.standard_attention(
                q, call.k, call.v, **options, first_query=call.first_query
            )
    return attention(inputs, impl, make_options(call, impl))


def _pick(impl: str | None, call: AttentionCall) -> str:
    """The implementation to use: the one asked for if it can serve the call, or the fastest."""
    if impl is None:
        # Interpreted kernels are right, but far too slow to be picked.
        candidates = IMPLS if call.q.device.type == "cuda" else ("sdpa", "reference")
        return next(name for name in candidates if OBSTACLES[name](call) is None)
    if not isinstance(impl, str) or impl not in OBSTACLES:
        raise ValueError(f"impl must be None or one of {IMPLS}, got {impl!r}")
    reason = OBSTACLES[impl](call)
    if reason is not None:
        raise ValueError(
            f"impl={impl!r} cannot serve this call: {reason}. "
            "impl=None picks an implementation that can"
        )
    return impl
