"""`context_attention`: attention of sequences that are sharded over several processes."""

from typing import Any, Literal

import torch
from torch import Tensor

from ..argument_types import check_bool, check_number, check_tensors
from ..attention import compute, flash_attention, pick
from ..autocast import in_autocast_dtypes
from ..limits import MIN_RING_TOKENS
from ..ops import IMPLEMENTATIONS
from ..options import (
    N_CALL_TENSORS,
    SCORE_OPTIONS,
    AttentionOptions,
    check_keywords,
    make_options,
    with_mask,
)
from ..transforms import is_plain_call, refuse_derivatives
from .gather import gather_kv, parts_by_gather
from .group import ContextGroup, chunk_tokens
from .ring import ring_attn_fwd
from .steps import halves, packed_masks, visible_halves

__all__ = ["ContextGroup", "context_attention"]

Method = Literal["ring", "gather"]

IMPLS = (*IMPLEMENTATIONS, "reference")

_RING_SERVES = frozenset({"causal", "doc_start", "softcap", "mask"})


def context_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    context: ContextGroup,
    method: Method | None = None,
    impl: str | None = None,
    deterministic: bool = False,
    **arguments: Any,
) -> Tensor:
    """Causal attention of sequences that are sharded over the processes of a group.

    Each process passes its tokens (`ContextGroup.shard`) and gets the output of its queries: its
    rows of `flash_attention` of the whole sequence. All processes must call it, with the same
    arguments except q, k, v and doc_start. Each must call it on one stream at a time. It can be
    captured in a CUDA graph after a first call with tensors of the same size.

    Args:
        q: (B, T / P, H, D), as in `flash_attention`; P is the size of the group.
        k, v: (B, T / P, H_kv, D).
        context: the group. In a group of one process, this is `flash_attention`.
        method: "ring" passes keys and values from process to process; it supports mask, doc_start,
            softmax_scale and softcap. "gather" copies all keys and values to all processes; it
            also supports window_size, kv_lengths and dropout. None picks the ring if it supports
            the call and each process has at least 2,048 tokens.
        impl: "hopper", "triton" or "reference", as in `flash_attention`.
        deterministic: as in `flash_attention`; all of these implementations are deterministic.
        arguments: those of `flash_attention`. causal must be True. doc_start (B, T / P) has
            positions in the whole sequence, for the queries of this process. mask is for T queries
            and keys; kv_lengths counts keys of the whole sequence. Dropout needs a seed, and drops
            the same weights as attention in a single process.

    Returns:
        out (B, T / P, H, D) in the dtype of q, or that of autocast, as in `flash_attention`.

    Raises:
        ValueError: an argument is malformed, or the method or impl cannot serve the call.

    Source: Ring Attention (arXiv 2310.01889); Llama 3 (arXiv 2407.21783, section 3.3.2).
    """
    check_keywords("context_attention", arguments)
    if not isinstance(context, ContextGroup):
        raise ValueError(
            f"context must be a ContextGroup, got {type(context).__name__}: "
            "ContextGroup(process_group) wraps a group of torch.distributed"
        )
    causal = arguments.setdefault("causal", True)
    check_bool("causal", causal)
    if not causal:
        raise ValueError(
            "causal must be True for context_attention, got False: attention that is not causal "
            "needs another order of tokens"
        )
    if impl is not None and not (isinstance(impl, str) and impl in IMPLS):
        raise ValueError(f"impl must be None or one of {IMPLS}, got {impl!r}")
    if method is not None and not (isinstance(method, str) and method in ("ring", "gather")):
        raise ValueError(f"method must be None, 'ring' or 'gather', got {method!r}")
    for name in ("sinks", "alibi_slopes"):
        if arguments.get(name) is not None:
            raise ValueError(f"{name} must be None for context_attention, which lacks this option")
    dropout_p = arguments.get("dropout_p", 0.0)
    check_number("dropout_p", dropout_p)
    if dropout_p > 0 and arguments.get("dropout_seed") is None:
        raise ValueError(
            f"dropout_p={dropout_p} needs dropout_seed, the same in all processes, got None"
        )
    if context.size == 1:
        return flash_attention(
            q, k, v, return_lse=False, impl=impl, deterministic=deterministic, **arguments
        )
    check_tensors(q=q, k=k, v=v)
    q, k, v = in_autocast_dtypes(q, k, v)
    n_keys = context.size * q.shape[1] if q.dim() == 4 else None
    options = make_options(q, k, v, deterministic=deterministic, n_keys=n_keys, **arguments)
    refuse_derivatives("context_attention", "flash_attention of the whole sequence")
    if k.shape[1] != q.shape[1]:
        raise ValueError(
            "q, k and v must hold the same tokens, those of this process: q has "
            f"{q.shape[1]}, k {k.shape[1]}"
        )
    c = chunk_tokens(q.shape[1])
    if _pick_method(method, q, options) == "ring":
        return _by_ring(q, k, v, options, context, impl)
    return _by_gather(q, k, v, options, context, impl, c)


def _pick_method(method: Method | None, q: Tensor, options: AttentionOptions) -> Method:
    """Check that the given method supports the call, or pick the faster method."""
    reason = options.unsupported_option(_RING_SERVES)
    if method == "ring" and reason is not None:
        raise ValueError(
            f"method='ring' cannot serve this call: {reason}. method=None picks one that can"
        )
    if method is None:
        return "gather" if reason or q.shape[1] < MIN_RING_TOKENS else "ring"
    return method


def _by_ring(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, context: ContextGroup,
    impl: str | None,
) -> Tensor:  # fmt: skip
    # Steps are merged by their lse, so the implementation must return it.
    impl = pick(impl, q, k, v, options._replace(return_lse=True))
    lists, sizes = _masks_of_steps(q, k, options, context, impl)
    # One tensor is sent in one exchange. torch.compile writes keys and values into it directly.
    kv = torch.stack((k, v))
    scores = [getattr(options, name) for name in SCORE_OPTIONS]
    return ring_attn_fwd(q, kv, options.doc_start, impl, context.name, scores, lists, sizes)[0]


def _masks_of_steps(
    q: Tensor, k: Tensor, options: AttentionOptions, context: ContextGroup, impl: str
) -> tuple[list[Tensor], list[int]]:
    """Masks of the steps of the ring, as arguments of the operator."""
    mask = options.mask
    if mask is None:
        return [], []
    steps, c = visible_halves(context), chunk_tokens(q.shape[1])
    chunk_pairs = tuple([step.chunks(context) for step in steps])
    parts = mask.parts(chunk_pairs, 2 * context.size, context.size * q.shape[1])
    masks: list[AttentionOptions | None] = []
    for step, part in zip(steps, parts, strict=True):
        rows, keys = q[:, halves(step.rows, c)], k[:, halves(step.keys, c)]
        step_options = AttentionOptions(causal=step.causal, doc_start=options.doc_start)
        masks.append(None if part.is_empty else with_mask(step_options, part, rows, keys, impl))
    return packed_masks(masks)


def _by_gather(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, context: ContextGroup,
    impl: str | None, c: int,
) -> Tensor:  # fmt: skip
    if options.dropout_p and c % 16:
        raise ValueError(
            f"dropout_p={options.dropout_p} needs chunks of a multiple of 16 tokens, got {c}: make "
            f"the length of the sequence a multiple of {32 * context.size}"
        )
    # On a CPU, None would pick SDPA for a chunk with T_q = T_k, but not for the other one.
    if impl is None and q.device.type == "cpu":
        impl = "reference"
    early_k, early_v, late_k, late_v = gather_kv(k, v, context.name)
    keys = ((early_k, early_v), (late_k, late_v))
    n_chunks = 2 * context.size
    masks = (None, None)
    if options.mask is not None:
        masks = options.mask.parts(parts_by_gather(context), n_chunks, n_chunks * c)
    outs = []
    for half, (chunk, rows, (k, v)) in enumerate(
        zip(context.chunks, q.split(c, 1), keys, strict=True)
    ):
        doc_start, kv_lengths = options.doc_start, options.kv_lengths
        if doc_start is not None:
            doc_start = doc_start[:, half * c : (half + 1) * c].contiguous()
        # Lengths count keys of the whole sequence, and this chunk gets the keys up to its end.
        if kv_lengths is not None:
            kv_lengths = kv_lengths.clamp(max=k.shape[1])
        chunk_options = options._replace(
            mask=masks[half], doc_start=doc_start, kv_lengths=kv_lengths, first_query=chunk * c
        )
        outs.append(attend_chunk(rows, k, v, chunk_options, impl))
    return torch.cat(outs, 1)


def attend_chunk(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, impl: str | None
) -> Tensor:
    """Attention of one chunk: queries from `options.first_query` on, and all keys up to their end.

    Dropout drops the same weights as in attention of the whole sequence.
    """
    assert options.first_query % 16 == 0 or not options.dropout_p, options.first_query
    impl = pick(impl, q, k, v, options)
    if impl in IMPLEMENTATIONS:
        options = options.for_kernels(q, k, impl)
    tensors = [x for x in options[:N_CALL_TENSORS] if isinstance(x, Tensor)]
    return compute((q, k, v), impl, options, is_plain=is_plain_call(q, k, v, *tensors))[0]
