"""Public attention API: validate the arguments, choose an implementation, and call it."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from . import hopper, triton
from .argument_types import check_tensors
from .autocast import in_autocast_dtypes
from .checks import check_sinks, check_slopes
from .mask.block_mask import BlockSparseMask
from .ops import IMPLEMENTATIONS, attention
from .options import (
    N_CALL_TENSORS,
    AttentionOptions,
    as_positions,
    check_keywords,
    make_options,
)
from .reference import eager, sdpa, standard
from .transforms import is_plain_call

_Reason = Callable[[Tensor, Tensor, Tensor, AttentionOptions], str | None]

# Why each implementation cannot serve a call, or None if it can; the fastest comes first.
UNSUPPORTED_REASONS: dict[str, _Reason] = {
    "hopper": hopper.unsupported_reason,
    "triton": triton.unsupported_reason,
    "sdpa": sdpa.unsupported_reason,
    "reference": lambda q, k, v, options: None,
    "eager": eager.unsupported_reason,
}
IMPLS = tuple(UNSUPPORTED_REASONS)


@overload
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, softmax_scale: float | None = None,
    window_size: int | None = None, mask: BlockSparseMask | None = None,
    doc_start: Tensor | None = None, kv_lengths: Tensor | None = None, sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None, softcap: float | None = None, dropout_p: float = 0.0,
    dropout_seed: Tensor | int | None = None, return_lse: Literal[False] = False,
    deterministic: bool = False, impl: str | None = None,
) -> Tensor: ...  # fmt: skip


@overload
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Any
) -> tuple[Tensor, Tensor]: ...


def flash_attention(  # pyright: ignore[reportInconsistentOverload]  # **options are those above
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
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | int | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    impl: str | None = None,
    **unknown: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention, softmax(q k^T * softmax_scale) v, in memory linear in the sequence length.

    Query i is at key position p = i + T_k - T_q, so masks align at the bottom right. A causal mask
    with T_q = 2, T_k = 4, and with T_q = 4, T_k = 2 (1 is visible):

        1 1 1 0         0 0
        1 1 1 1         0 0
                        1 0
                        1 1

    A query sees a key if causal, window_size, mask, doc_start and kv_lengths all allow it. A query
    that sees no key has output 0, lse -inf (its sink, if there are sinks) and gradients 0.

    Under autocast q, k and v are cast to its dtype, as in PyTorch's scaled_dot_product_attention;
    their dtypes may differ before that.

    Hidden keys and values must also be finite (0, for example): an implementation may multiply any
    of them by their weight of 0, and 0 * NaN is NaN.

    Args:
        q: (B, T_q, H, D), fp16, bf16 or fp32, D up to 256. The last dimension must be contiguous;
            this project's kernels take strides of up to 2^24 elements in T.
        k, v: (B, T_k, H_kv, D), same dtype and device. H must be a multiple of H_kv: head h reads
            key-value head h // (H / H_kv) (grouped-query attention).
        causal: hide from each query the keys that come after it, j > p.
        softmax_scale: positive and finite; default 1 / sqrt(D).
        window_size: W >= 1 hides the keys with |p - j| >= W. With causal, a query sees W keys,
            itself included; without, W - 1 on either side of itself.
        mask: block-sparse; its layout must have ceil(T_q / block) x ceil(T_k / block) blocks.
        doc_start: (B or 1, T_q) int32 or int64, the key position at which each query's document
            begins: earlier keys are hidden (packed documents).
        kv_lengths: (B or 1,) int32 or int64, the number of keys that are not padding. Later keys
            are hidden; query positions still depend on T_k.
        sinks: (H,), any floating dtype, below +inf: for each head, an extra score in the softmax
            that has no value (arXiv 2309.17453; learnable as in gpt-oss). lse includes it.
        alibi_slopes: (H,), any floating dtype, without a gradient: adds -slope * |p - j| to the
            scores of a head (ALiBi, arXiv 2108.12409). Not together with softcap.
        softcap: c > 0 replaces a score s by c * tanh(s / c) (Gemma 2, arXiv 2408.00118).
        dropout_p: probability, in [0, 1), of setting an attention weight to zero; the others are
            divided by 1 - dropout_p.
        dropout_seed: int64 tensor with one element on the device of q, or an int; in [0, 2^63).
            Whether a weight is dropped is a pure function of (seed, batch, head, query, key), the
            same in every implementation except "sdpa" and "eager", which take no seed. With None,
            all implementations draw from PyTorch's generator of the device.
        return_lse: also return the log-sum-exp of each row of scores, which is differentiable.
        deterministic: require that a repeated call gives the same bits, gradients included. All
            implementations except "sdpa" and "eager" always do; dropout needs the same seed, or
            the same state of the generator. This holds for calls of the same shape. If the batch
            size changes, out of a sequence keeps its bits, but its gradients may differ by rounding
            (impl="hopper", causal, without a mask).
        impl: "hopper" (kernels for H100 and H200), "triton" (portable kernels), "sdpa" (PyTorch's
            scaled_dot_product_attention), "reference" (standard attention, exact, quadratic
            memory) or "eager" (unfused attention in the dtype of q, as a baseline). None picks
            the fastest one that can serve the call; a named one that cannot raises ValueError.

    Returns:
        out (B, T_q, H, D) in the dtype of q, or that of autocast; with return_lse also lse
        (B, H, T_q), fp32, natural logarithm.

    Raises:
        ValueError: an argument is malformed, or the named impl cannot serve the call.
        TypeError: an argument does not exist; the message names ours for those of other packages.

    Source: FlashAttention (arXiv 2205.14135) and FlashAttention-2 (arXiv 2307.08691).
    """
    if unknown:
        check_keywords("flash_attention", unknown)
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        check_tensors(q=q, k=k, v=v)
    out, lse = _attend(
        (q, k, v), impl, causal=causal, softmax_scale=softmax_scale, window_size=window_size,
        mask=mask, doc_start=doc_start, kv_lengths=kv_lengths, sinks=sinks,
        alibi_slopes=alibi_slopes, softcap=softcap, dropout_p=dropout_p, dropout_seed=dropout_seed,
        return_lse=return_lse, deterministic=deterministic,
    )  # fmt: skip
    if not return_lse:
        return out
    assert lse is not None  # implementations without one refuse return_lse
    return out, lse


@overload
def flash_attention_packed(
    qkv: Tensor, *, return_lse: Literal[False] = False, **options: Any
) -> Tensor: ...


@overload
def flash_attention_packed(
    qkv: Tensor, *, return_lse: Literal[True], **options: Any
) -> tuple[Tensor, Tensor]: ...


def flash_attention_packed(
    qkv: Tensor,
    *,
    return_lse: bool = False,
    deterministic: bool = False,
    impl: str | None = None,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_attention` of q, k and v in one tensor, the output of one linear layer.

    The backward pass writes the gradient of that tensor directly; autograd would copy three
    gradients into it.

    Args:
        qkv: (B, T, 3, H, D); q, k and v are qkv[:, :, 0] to qkv[:, :, 2].
        return_lse, deterministic, impl, options: as in `flash_attention`.

    Returns:
        out (B, T, H, D) in the dtype of qkv, or that of autocast; with return_lse also lse
        (B, H, T), fp32, natural logarithm.

    Raises:
        ValueError: an argument is malformed, or the named impl cannot serve the call.
    """
    check_keywords("flash_attention_packed", options)
    check_tensors(qkv=qkv)
    if qkv.dim() != 5 or qkv.shape[2] != 3:
        raise ValueError(f"qkv must be (B, T, 3, H, D), got shape {tuple(qkv.shape)}")
    out, lse = _attend((qkv,), impl, return_lse=return_lse, deterministic=deterministic, **options)
    if not return_lse:
        return out
    assert lse is not None  # implementations without one refuse return_lse
    return out, lse


# ---- dispatch: from the arguments to an implementation


class _Decision(NamedTuple):
    """Cached dispatch result, for all calls that differ only in the contents of their tensors."""

    impl: str
    options: AttentionOptions  # without the tensors of a call
    needs_tensors: bool  # whether a call adds tensors or a seed to the options


# Decisions for calls without a mask; each mask holds its own.
_DECISIONS: dict[tuple, _Decision] = {}
# All are dropped at this number, because a program whose shapes never repeat must not leak memory.
_MAX_DECISIONS = 256
_HASHABLE = frozenset({bool, int, float, str, type(None)})


def _attend(
    inputs: tuple[Tensor, ...],
    impl: str | None,
    *,
    mask: BlockSparseMask | None = None,
    **arguments: Any,
) -> tuple[Tensor, Tensor | None]:
    """Check and dispatch a call: out, and lse or None if it is not returned.

    `inputs` are q, k and v, or qkv.
    """
    inputs = in_autocast_dtypes(*inputs)
    tensors = [x for x in arguments.values() if isinstance(x, Tensor)]
    is_plain = is_plain_call(*inputs, *tensors)
    chosen, options = decide(inputs, impl, mask=mask, is_plain=is_plain, **arguments)
    return compute(inputs, chosen, options, is_plain=is_plain)


def decide(
    inputs: tuple[Tensor, ...], impl: str | None, *, mask: BlockSparseMask | None = None,
    is_plain: bool, **arguments: Any,
) -> tuple[str, AttentionOptions]:  # fmt: skip
    """Check a call: the name of the implementation that serves it, and the options to pass to it.

    The checks and the choice of an implementation take more CPU time than a short kernel runs. They
    depend only on shapes, strides, dtypes, devices and options, so the result is cached.

    Args:
        inputs: q, k and v, or qkv.
        is_plain: `is_plain_call` of the inputs and of tensors among the arguments; otherwise,
            nothing is cached.
        arguments: of `flash_attention`.
    """
    if mask is None:
        decisions = _DECISIONS
    else:
        decisions = mask.decisions if isinstance(mask, BlockSparseMask) else {}
    key = _decision_key(inputs, impl, arguments) if is_plain else None
    decision = None if key is None else decisions.get(key)
    if decision is not None:
        chosen, options, needs_tensors = decision
        return chosen, _with_tensors(options, inputs, arguments) if needs_tensors else options
    q, k, v = inputs if len(inputs) == 3 else inputs[0].unbind(2)
    options = make_options(q, k, v, mask=mask, **arguments)
    chosen = pick(impl, q, k, v, options)
    if chosen in IMPLEMENTATIONS:
        options = options.for_kernels(q, k, chosen)
    # Options that hold a mask are not cached: the cache is an attribute of that mask, which would
    # then keep itself alive.
    if key is not None and options.mask is None:
        options = options._replace(launches={})
        if len(decisions) >= _MAX_DECISIONS:
            decisions.clear()
        needs_tensors = options.has_tensors or options.dropout_p > 0
        decisions[key] = _Decision(chosen, options.without_tensors(), needs_tensors)
    return chosen, options


def _decision_key(
    inputs: tuple[Tensor, ...], impl: str | None, arguments: dict[str, Any]
) -> tuple | None:
    """Cache key: all that a decision depends on, except the mask; None for malformed arguments."""
    values: tuple[Any, ...] = (impl, *arguments.values())
    # Types are part of the key: 1 and 1.0 equal True, but only True is a valid bool.
    kinds = tuple(map(type, values))
    if not _HASHABLE.issuperset(kinds) or type(arguments.get("dropout_seed")) is int:
        values = (impl, *[_layout(name, value) for name, value in arguments.items()])
        if any(value is _MALFORMED for value in values) or type(impl) not in _HASHABLE:
            return None
    layouts = [(x.shape, x.stride(), x.dtype, x.device) for x in inputs]
    return tuple(arguments), values, kinds, *layouts


_MALFORMED = object()


def _layout(name: str, value: Any) -> Any:
    """Key of one argument: the layout of a tensor, or the value of anything else."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.device
    if type(value) not in _HASHABLE:
        return _MALFORMED
    if name == "dropout_seed" and type(value) is int:
        return 0 <= value < 2**63  # one decision for all valid seeds
    return value


def _with_tensors(
    options: AttentionOptions, inputs: tuple[Tensor, ...], arguments: dict[str, Any]
) -> AttentionOptions:
    """Add the tensors and the seed of a call to the cached options of a decision."""
    get, n_keys = arguments.get, inputs[-1].shape[1]
    doc_start, kv_lengths, sinks = get("doc_start"), get("kv_lengths"), get("sinks")
    slopes = get("alibi_slopes")
    # The key covers layouts, but these checks also read values or whether a gradient is required.
    check_sinks(inputs[0], sinks)
    check_slopes(inputs[0], slopes, None)
    batch = inputs[0].shape[0]
    doc_start = as_positions(batch, n_keys, doc_start)
    kv_lengths = as_positions(batch, n_keys, kv_lengths)
    seed = get("dropout_seed") if options.dropout_p else None
    tensors = seed, doc_start, kv_lengths, sinks, slopes
    return AttentionOptions._make((*tensors, *options[N_CALL_TENSORS:]))


def pick(impl: str | None, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> str:
    """Name of the implementation to use: the given one, or the fastest that serves the call.

    Raises:
        ValueError: the given one does not exist, or cannot serve the call.
    """
    if impl is None:
        # Interpreted kernels are correct, but far too slow to be a default.
        candidates = IMPLS if q.device.type == "cuda" else ("sdpa", "reference")
        return next(
            name for name in candidates if UNSUPPORTED_REASONS[name](q, k, v, options) is None
        )
    if not isinstance(impl, str) or impl not in UNSUPPORTED_REASONS:
        renamed = ", which is now called 'eager'" if impl == "unfused" else ""
        raise ValueError(f"impl must be None or one of {IMPLS}, got {impl!r}{renamed}")
    reason = UNSUPPORTED_REASONS[impl](q, k, v, options)
    if reason is not None:
        raise ValueError(
            f"impl={impl!r} cannot serve this call: {reason}. "
            "impl=None picks an implementation that can"
        )
    return impl


def compute(
    inputs: tuple[Tensor, ...], impl: str, options: AttentionOptions, *, is_plain: bool
) -> tuple[Tensor, Tensor | None]:
    """Run an implementation: out, and lse or None if it is not returned.

    Args:
        inputs: q, k and v, or one tensor (B, T, 3, H, D) of them.
        options: with the lists of a mask, if `impl` has kernels.
        is_plain: `is_plain_call` of the inputs.
    """
    device = inputs[0].device
    if impl in IMPLEMENTATIONS:
        return attention(inputs, impl, options.for_operators(device), is_plain=is_plain)
    q, k, v = inputs if len(inputs) == 3 else inputs[0].unbind(2)
    if impl == "sdpa":
        return sdpa.sdpa_attention(q, k, v, options), None
    if impl == "eager":
        return eager.eager_attention(q, k, v, options), None
    keywords = options.seeded(device).keywords()
    # Autocast would compute the reference's wide matrix products in a narrower dtype. Meta tensors
    # have no autocast to turn off.
    with nullcontext() if q.is_meta else torch.autocast(device.type, enabled=False):
        return standard.standard_attention(q, k, v, **keywords)
