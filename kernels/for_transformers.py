"""`flash_attention` as an attention implementation for models of Hugging Face's transformers.

transformers calls `visible_keys` once per forward pass to make a mask, and passes the mask to the
attention of each layer. The model defines the mask as a function of a query's and a key's position.
Bisection finds the range of keys that each query sees, and only the bounds of these ranges are
stored, so memory stays linear. Masks in which the keys of a query are not one range are refused.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .attention import IMPLS, flash_attention
from .tensor_cache import TensorCache, is_traced

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(batch, head, query, key), integers that broadcast -> bool: whether the query sees the key."""

INSTEAD = 'use attn_implementation="sdpa"'
_INSTEAD_OF = {
    "cu_seq_lens_q": ": pass position_ids only, starting at 0 in each document",
    "block_table": ', nor is continuous batching: use attn_implementation="paged|sdpa"',
}


def register_with_transformers(name: str = "papilio", *, impl: str | None = None) -> None:
    """Register `attn_implementation=name` with transformers.

        papilio.register_with_transformers()
        model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="papilio")

    Supports causal and bidirectional attention, grouped heads, padding on either side, sliding
    windows and chunks, packed documents, dropout, softcap, sinks, and dynamic and static caches.
    Under autocast, as with Trainer(bf16=True), attention runs in its dtype.
    Outputs at padding are undefined and may differ from those of other implementations.

    As in flash_attention_2, a document begins where position_ids equal the minimum of their row, in
    calls whose cache is empty or absent. Compiled models always apply these starts, because
    they cannot read values. Chunked layers (Llama 4) with more tokens than a chunk need
    use_cache=False for packed documents.

    Args:
        name: the name under which models request it.
        impl: of `flash_attention`; None picks the fastest for each call.

    Raises:
        ImportError: transformers is missing, or is older than 5.4.
        ValueError: impl does not exist. A model raises it later if impl lacks an option it needs.
    """
    if impl is not None and impl not in IMPLS:
        raise ValueError(f"impl must be None or one of {IMPLS}, got {impl!r}")
    import transformers
    from transformers import masking_utils, modeling_utils

    if "q_length" not in inspect.signature(masking_utils.sdpa_mask).parameters:
        raise ImportError(
            f"transformers {transformers.__version__} has another interface for masks: "
            "pip install 'transformers>=5.4'"
        )
    modeling_utils.AttentionInterface.register(name, partial(attention_of_layer, impl=impl))
    masking_utils.AttentionMaskInterface.register(name, visible_keys)


def visible_keys(
    batch_size: int, q_length: int, kv_length: int, q_offset: int | Tensor = 0, kv_offset: int = 0,
    *, mask_function: MaskFunction, attention_mask: Tensor | None = None,
    local_size: int | None = None, allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool | None = None, use_vmap: bool = False,
    device: torch.device | str = "cpu", **_: Any,
) -> Tensor | None:  # fmt: skip
    """Bounds of the keys that each query sees, for transformers.masking_utils.

    Args:
        batch_size, q_length, kv_length: B, T_q and T_k.
        q_offset, kv_offset: position of the first query and of the first key.
        mask_function: a causal mask, window, chunks or packed documents, without padding.
        attention_mask: (B, at most kv_offset + T_k) bool, False at padding; keys past its end
            are hidden.
        local_size: size of the window or chunk, in tokens.
        allow_is_causal_skip: whether a causal mask hides nothing else.
        allow_is_bidirectional_skip: not None in a mask that is not causal.
        use_vmap: whether mask_function comes from outside of transformers.
        device: of the result.

    Returns:
        None if causality, or the sliding window that layers pass, describes the mask. Otherwise
        int32 (B, 2, T_q, n_keys): the first key of each query and the end of the keys before
        padding, relative to kv_offset; expanded along the n_keys filled so far in the cache.

    Raises:
        ValueError: the keys of a query are not one range.
    """
    causal = allow_is_bidirectional_skip is None
    if use_vmap:
        raise ValueError(f"masks overlaid by a model's own function are not supported: {INSTEAD}")
    if not causal and local_size is not None and local_size < kv_length - 1:
        raise ValueError(
            f"sliding_window={local_size} of a model that is not causal is not supported with "
            f"{kv_length} keys: {INSTEAD}"
        )
    n_keys = q_offset + q_length - kv_offset if causal else kv_length
    if isinstance(n_keys, Tensor):
        # A static cache. Steps of one token are compiled, and must not read the length.
        n_keys = kv_length if q_length == 1 else int(n_keys)
    compiling = torch.compiler.is_compiling()
    padded = attention_mask is not None and (
        attention_mask.shape[1] < kv_offset + n_keys or compiling or not attention_mask.all()
    )
    plain = (allow_is_causal_skip or not causal) and not padded and n_keys == kv_length
    if plain and _needs_no_bounds(mask_function, kv_length, local_size if causal else None):
        return None

    # The range of each query: all keys so far, except those that the mask hides and padding.
    query = (torch.arange(q_length, device=device)[None] + q_offset).expand(batch_size, -1)
    batch = torch.arange(batch_size, device=device)[:, None]
    first, end = torch.zeros_like(query) + kv_offset, torch.zeros_like(batch) + kv_offset + n_keys
    if causal:
        sees = partial(mask_function, batch, torch.zeros_like(batch))
        first = _first_visible(sees, query, kv_offset, n_keys, check=not compiling)
        end = torch.minimum(end, query[:, -1:] + 1)
    if attention_mask is not None:
        start, stop = _token_bounds(attention_mask, check=not compiling)
        first, end = torch.maximum(first, start), torch.minimum(end, stop)
    bounds = torch.stack([first, end.expand_as(first)], 1) - kv_offset
    return bounds.int()[..., None].expand(-1, -1, -1, n_keys)


def _needs_no_bounds(mask_function: MaskFunction, kv_length: int, local_size: int | None) -> bool:
    """Whether causality or a layer's window describes a mask without padding."""
    if local_size is None or local_size >= kv_length:
        return True
    # Query local_size sees key 1 in a sliding window, but not in a chunk. Tensors without
    # dimensions may be on the CPU even if the mask's own are on a GPU.
    zero, one, query = (torch.tensor(number) for number in (0, 1, local_size))
    return bool(mask_function(zero, zero, query, one))


def _first_visible(
    sees: Callable[[Tensor, Tensor], Tensor], query: Tensor, kv_offset: int, n_keys: int, *,
    check: bool,
) -> Tensor:  # fmt: skip
    """First key that each query sees, (B, T_q) int64, if it sees all keys from there to itself."""
    low, high = torch.zeros_like(query) + kv_offset, query
    if check:
        after = torch.clamp(query + 1, max=query[:, -1:])
        looks_ahead = sees(query, after) & (after > query)
        if looks_ahead.any() or not sees(query, query).all():
            raise ValueError(
                "a causal mask in which a token sees later tokens, or not itself (as with images), "
                f"is not supported: {INSTEAD}"
            )
    # A loop, because bit_length() would make torch.compile specialize on the length.
    n_steps = 0
    while n_keys >= 1 << n_steps:
        n_steps += 1
    for _ in range(n_steps):
        middle = (low + high) // 2
        visible = sees(query, middle)
        low, high = torch.where(visible, low, middle + 1), torch.where(visible, middle, high)
    return high


def _token_bounds(attention_mask: Tensor, *, check: bool) -> tuple[Tensor, Tensor]:
    """First position and end of the tokens of each row, without padding: (B, 1) int64 each."""
    position = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    start = torch.where(attention_mask, position, len(position)).amin(1, keepdim=True)
    end = torch.where(attention_mask, position + 1, 0).amax(1, keepdim=True)
    if check and (attention_mask.sum(1, keepdim=True) != (end - start).clamp(min=0)).any():
        raise ValueError(
            f"attention_mask has padding between tokens: move it before or after them, or {INSTEAD}"
        )
    return start, end


def attention_of_layer(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
    dropout: float = 0.0, scaling: float | None = None, sliding_window: int | None = None,
    softcap: float | None = None, s_aux: Tensor | None = None, is_causal: bool | None = None,
    deterministic: bool | None = None, impl: str | None = None, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention of one layer, for transformers.AttentionInterface.

    Args:
        module: the layer; its attribute is_causal is used if the argument is None.
        query: (B, H, T_q, D).
        key, value: (B, H_kv, T_k, D); the last dimension of value may be smaller than D.
        attention_mask: from `visible_keys`.
        dropout, scaling, sliding_window, softcap, s_aux, deterministic: dropout_p, softmax_scale,
            window_size, softcap, sinks and deterministic of `flash_attention`.
        impl: of `flash_attention`.
        others: arguments of other implementations; those that would change the result are refused.

    Returns:
        (B, T_q, H, D of value), and None instead of the weights, which are never formed.

    Raises:
        ValueError: the model needs what is not supported.
    """
    for name in ("position_bias", "head_mask", "cu_seq_lens_q", "block_table"):
        if others.get(name) is not None:
            raise ValueError(f"{name} is not supported{_INSTEAD_OF.get(name, f': {INSTEAD}')}")
    if others.get("output_attentions"):
        raise ValueError(
            "output_attentions=True is not supported, because the weights are never formed: "
            'use attn_implementation="eager"'
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    doc_start = kv_lengths = None
    if attention_mask is not None:
        if attention_mask.dtype != torch.int32 or attention_mask.shape[1] != 2:
            raise ValueError(
                f"an attention_mask of shape {tuple(attention_mask.shape)}, {attention_mask.dtype}"
                f" is not supported: pass one of shape (batch, tokens), 0 at padding; or {INSTEAD}"
            )
        n_keys = attention_mask.shape[-1]
        key, value = key[:, :, :n_keys], value[:, :, :n_keys]
        doc_start, kv_lengths = attention_mask[:, 0, :, 0], attention_mask[:, 1, 0, 0]
        sliding_window = None  # the bounds include it
    if causal and query.shape[2] == key.shape[2] > 1:  # no keys of an earlier call
        starts = _document_starts(others.get("position_ids"))
        if starts is not None:
            starts = starts.expand(query.shape[0], -1)
            doc_start = starts if doc_start is None else torch.maximum(starts, doc_start)
    value_dim = value.shape[-1]
    if value_dim != key.shape[-1]:
        value = F.pad(value, (0, key.shape[-1] - value_dim))
    out = flash_attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2),
        causal=causal and query.shape[2] > 1, softmax_scale=scaling, window_size=sliding_window,
        doc_start=doc_start, kv_lengths=kv_lengths, sinks=s_aux, softcap=softcap,
        dropout_p=dropout, deterministic=bool(deterministic), impl=impl,
    )  # fmt: skip
    return out[..., :value_dim], None


# Document starts by position_ids, which all layers of a model share.
_STARTS: TensorCache[Tensor | None] = TensorCache()


def _document_starts(position_ids: Tensor | None) -> Tensor | None:
    """First token of each token's document, (B or 1, T) int32; None if no row has two documents.

    Reads values once per forward pass, which synchronizes with the GPU. transformers does so as
    often in a call without a cache, and flash_attention_2 in each layer. Under torch.compile, and
    while a CUDA graph is captured, nothing can be read, so the starts are always returned.
    """
    if position_ids is None or position_ids.dim() != 2:
        return None
    if is_traced(position_ids):
        return _row_minima(position_ids)
    return _STARTS.get(position_ids, _starts_if_any)


def _starts_if_any(position_ids: Tensor) -> Tensor | None:
    """Starts of the documents, or None if all are 0."""
    starts = _row_minima(position_ids)
    return starts if starts.any() else None


def _row_minima(position_ids: Tensor) -> Tensor:
    """Index of the last minimum of its row up to each position; 0 before the first."""
    is_start = position_ids == position_ids.amin(1, keepdim=True)
    index = torch.arange(position_ids.shape[1], device=position_ids.device)
    return torch.where(is_start, index, 0).cummax(1).values.int()
