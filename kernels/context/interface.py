"""`context_attention`: attention of sequences that several processes share, our kernels inside."""

from typing import Literal, Unpack

import torch
from torch import Tensor

from ..argument_types import check_bool, check_number
from ..attention import checked_call, chunk_attention, flash_attention, pick_with_lse
from ..call import AttentionArguments, AttentionCall
from ..checks import check_keywords
from ..limits import RING_LEAST_TOKENS
from ..ops import IMPLEMENTATIONS
from ..options import AttentionOptions, with_mask
from ..transforms import refuse_derivatives
from .gather import gather_kv, parts_by_gather
from .group import ContextGroup, chunk_tokens
from .ring import ring_attn_fwd
from .steps import halves, meetings, packed_masks

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
    **arguments: Unpack[AttentionArguments],
) -> Tensor:
    """Causal attention of sequences that the processes of a group share.

    Each process passes its tokens (`ContextGroup.shard`) and gets the output of its queries: the
    rows that `flash_attention` of the whole sequence would have. All processes must call it, with
    the same arguments but for q, k, v and doc_start, and each on one stream at a time. In a CUDA
    graph it can be captured when shapes of this size have been called once before.

    Args:
        q: (B, T / P, H, D), as in `flash_attention`; P is the size of the group.
        k, v: (B, T / P, H_kv, D).
        context: the group. Alone in it, this is `flash_attention`.
        method: "ring" sends keys and values round, each process holds its own: attention with
            mask, doc_start, softmax_scale and softcap. "gather" brings all keys and values to
            all processes, and serves window_size, kv_lengths and dropout, too. None picks the
            ring for what it serves, from 2,048 tokens a process on.
        impl: "hopper", "triton" or "reference", as in `flash_attention`.
        deterministic: as in `flash_attention`; these all repeat bit for bit.
        arguments: those of `flash_attention`. causal is True. doc_start (B, T / P) holds positions
            in the whole sequence, for the queries of this process. mask is for T queries and keys,
            kv_lengths counts keys of the T. Dropout needs a seed, and drops what it drops in one
            process.

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
            "ContextGroup(process_group) makes one of a group of torch.distributed"
        )
    causal = arguments.setdefault("causal", True)
    check_bool("causal", causal)
    if not causal:
        raise ValueError(
            "causal must be True for context_attention, got False: attention that looks ahead has "
            "another order of tokens"
        )
    if impl is not None and not (isinstance(impl, str) and impl in IMPLS):
        raise ValueError(f"impl must be None or one of {IMPLS}, got {impl!r}")
    if method is not None and not (isinstance(method, str) and method in ("ring", "gather")):
        raise ValueError(f"method must be None, 'ring' or 'gather', got {method!r}")
    if arguments.get("sinks") is not None:
        raise ValueError("sinks must be None for context_attention, which does not serve them")
    dropout_p = arguments.get("dropout_p", 0.0)
    check_number("dropout_p", dropout_p)
    if dropout_p > 0 and arguments.get("dropout_seed") is None:
        raise ValueError(
            f"dropout_p={dropout_p} needs dropout_seed, the same in all processes, got None"
        )
    if context.size == 1:
        return flash_attention(q, k, v, impl=impl, deterministic=deterministic, **arguments)
    call = checked_call(q, k, v, deterministic=deterministic, **arguments)
    refuse_derivatives("context_attention", "flash_attention of the whole sequence")
    if k.shape[1] != q.shape[1]:
        raise ValueError(
            "q, k and v must hold the same tokens, those of this process: q has "
            f"{q.shape[1]}, k {k.shape[1]}"
        )
    c = chunk_tokens(q.shape[1])
    window_size = arguments.get("window_size")
    if window_size is not None and window_size >= context.size * q.shape[1]:
        call.arguments["window_size"] = None  # no key is that far from any query
    if _pick_method(method, call) == "ring":
        return _by_ring(call, context, impl)
    return _by_gather(call, context, impl, c)


def _pick_method(method: Method | None, call: AttentionCall) -> Method:
    """The method asked for if it can serve the call, or the faster one."""
    obstacle = call.lacks(_RING_SERVES)
    if method == "ring" and obstacle is not None:
        raise ValueError(
            f"method='ring' cannot serve this call: {obstacle}. method=None picks one that can"
        )
    if method is None:
        short = call.q.shape[1] < RING_LEAST_TOKENS
        return "gather" if obstacle or short else "ring"
    return method


def _by_ring(call: AttentionCall, context: ContextGroup, impl: str | None) -> Tensor:
    q, k, v = call.q, call.k, call.v
    impl = pick_with_lse(impl, call)
    doc_start = call.arguments.get("doc_start")
    if doc_start is not None:
        # beyond the sequence all mean the same, and past 2^31 they would wrap around
        doc_start = doc_start.clamp(0, context.size * q.shape[1]).to(torch.int32)
    softcap = call.arguments.get("softcap") or 0.0
    lists, sizes = _masks_of_steps(call, context, impl)
    # one tensor to send; torch.compile writes keys and values there in the first place
    kv = torch.stack((k, v))
    return ring_attn_fwd(
        q, kv, doc_start, impl, context.name, call.softmax_scale, softcap, lists, sizes
    )[0]


def _masks_of_steps(
    call: AttentionCall, context: ContextGroup, impl: str
) -> tuple[list[Tensor], list[int]]:
    """The part of the mask that each step of the ring has, as the operator takes them."""
    mask, doc_start = call.arguments.get("mask"), call.arguments.get("doc_start")
    if mask is None:
        return [], []
    steps, c = meetings(context), chunk_tokens(call.q.shape[1])
    wanted = tuple([step.chunks(context) for step in steps])
    parts = mask.parts(wanted, 2 * context.size, context.size * call.q.shape[1])
    found: list[AttentionOptions | None] = []
    for step, part in zip(steps, parts, strict=True):
        q, k = call.q[:, halves(step.rows, c)], call.k[:, halves(step.keys, c)]
        options = AttentionOptions(causal=step.causal, doc_start=doc_start)
        found.append(None if part.is_empty else with_mask(options, part, q, k, impl))
    return packed_masks(found)


def _by_gather(call: AttentionCall, context: ContextGroup, impl: str | None, c: int) -> Tensor:
    arguments = call.arguments.copy()
    mask, doc_start, kv_lengths, dropout_p = (
        arguments.get(name) for name in ("mask", "doc_start", "kv_lengths", "dropout_p")
    )
    if dropout_p and c % 16:
        raise ValueError(
            f"dropout_p={dropout_p} needs chunks of a multiple of 16 tokens, got {c}: make "
            f"the length of the sequence a multiple of {32 * context.size}"
        )
    if impl is None and call.q.device.type == "cpu":
        impl = "reference"  # of PyTorch's own, one would serve one chunk and not the other
    early_k, early_v, late_k, late_v = gather_kv(call.k, call.v, context.name)
    keys = ((early_k, early_v), (late_k, late_v))
    n_chunks = 2 * context.size
    masks = (None, None)
    if mask is not None:
        masks = mask.parts(parts_by_gather(context), n_chunks, n_chunks * c)
    outs = []
    for half, (chunk, q, (k, v)) in enumerate(
        zip(context.chunks, call.q.split(c, 1), keys, strict=True)
    ):
        arguments["mask"] = masks[half]
        if doc_start is not None:
            arguments["doc_start"] = doc_start[:, half * c : (half + 1) * c]
        if kv_lengths is not None:
            arguments["kv_lengths"] = kv_lengths.clamp(max=k.shape[1])
        out = chunk_attention(
            q,
            k,
            v,
            first_query=chunk * c,
            impl=impl,
            deterministic=call.deterministic,
            **arguments,
        )
        outs.append(out)
    return torch.cat(outs, 1)
