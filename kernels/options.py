"""Options of one attention call: checked once, and passed down to the kernels."""

import functools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from .argument_types import check_bool, check_number, is_whole_number, plain_bool
from .checks import (
    check_dropout_seed,
    check_mask,
    check_positions,
    check_qkv,
    check_sinks,
    check_slopes,
)
from .mask.block_mask import BlockSparseMask

# Kernels visit the tiles that need no mask in one loop, the others in another.
UNMASKED_LOOP, MASKED_LOOP = 1, 2
EMPTY_ROWS = 4  # under a block-sparse mask some queries see no block


class AttentionOptions(NamedTuple):
    """Options of one attention call; meanings are those of `kernels.flash_attention`.

    The fields up to `first_query` are the arguments of the operators in kernels/ops.py, in their
    order. The lists of a block-sparse mask are tensors of `kernels.mask.lists.MaskLists`: none, the
    first four, or all of them for the Hopper kernels. `for_kernels` makes them from `mask`.
    """

    dropout_seed: Tensor | int | None = None
    """For the kernels, with dropout: an int64 tensor of one element."""
    doc_start: Tensor | None = None  # (B, T_q) int32, contiguous
    kv_lengths: Tensor | None = None  # (B,) int32, contiguous
    sinks: Tensor | None = None  # (H,), for the kernels fp32 and contiguous
    alibi_slopes: Tensor | None = None
    """(H,); for the kernels fp32, contiguous, and divided by softmax_scale."""
    mask_rows: Tensor | None = None
    mask_row_blocks: Tensor | None = None
    mask_cols: Tensor | None = None
    mask_col_blocks: Tensor | None = None
    mask_col_ranges: Tensor | None = None
    mask_visits: Tensor | None = None
    mask_cuts: Tensor | None = None
    mask_block_size: int = 0  # of the lists, 0 without a mask
    mask_packed: bool = False
    mask_loops: int = UNMASKED_LOOP | MASKED_LOOP  # loops that have a tile to visit
    softmax_scale: float = 1.0
    causal: bool = False
    window_size: int = 0  # 0 without a window
    softcap: float = 0.0  # 0 without a cap
    dropout_p: float = 0.0
    first_query: int = 0
    """Number of the first query in its sequence, for dropout; a multiple of 16."""
    # The fields below serve the dispatch, and are not arguments of the operators.
    mask: BlockSparseMask | None = None
    return_lse: bool = False
    deterministic: bool = False
    launches: dict[str, Any] | None = None
    """Prepared launches by pass, shared by calls that differ only in their tensors."""

    @property
    def features(self) -> "Features":
        """Compile-time part of the options."""
        return _features(
            causal=self.causal,
            window=self.window_size > 0,
            documents=self.doc_start is not None,
            lengths=self.kv_lengths is not None,
            softcap=self.softcap > 0.0,
            sinks=self.sinks is not None,
            alibi=self.alibi_slopes is not None,
            dropout=self.dropout_p > 0.0,
            mask_block_size=self.mask_block_size,
            packed=self.mask_packed,
            unmasked_loop=self.mask_loops & UNMASKED_LOOP > 0,
            masked_loop=self.mask_loops & MASKED_LOOP > 0,
            empty_rows=self.mask_loops & EMPTY_ROWS > 0,
        )

    @property
    def softcap_scale(self) -> float:
        """Factor on q k^T before the tanh of the softcap; 0 without a softcap."""
        return self.softmax_scale / self.softcap if self.softcap else 0.0

    @property
    def scale_log2(self) -> float:
        """Factor that turns q k^T, or the tanh of a softcap, into a score in base 2."""
        return (self.softcap or self.softmax_scale) * math.log2(math.e)

    @property
    def keep_scale(self) -> float:
        """Factor on the probabilities that dropout keeps."""
        return 1.0 / (1.0 - self.dropout_p)

    @property
    def drop_threshold(self) -> int:
        """Dropout threshold: a probability is dropped if its 32 random bits, unsigned, are below.

        Returned as the int32 with the same bits, which kernels take as an argument.
        """
        threshold = int(self.dropout_p * 2**32)
        return threshold - 2**32 if threshold >= 2**31 else threshold

    def unsupported_option(self, supported: Collection[str]) -> str | None:
        """Reason why an implementation that supports only some options refuses the call, or None.

        Options that are not listed are refused, so a new option is never silently ignored.

        Args:
            supported: names of keyword arguments of `flash_attention`.
        """
        for name in KEYWORDS:
            value = getattr(self, name)
            # Only the presence of a mask or tensor counts: PyTorch 2.11 cannot compile bool(mask).
            used = bool(value) if isinstance(value, (int, float)) else value is not None
            if used and name not in supported and name != "softmax_scale":
                return f"it does not support {name}"
        return None

    def keywords(self) -> dict[str, Any]:
        """Keyword arguments for `kernels.reference.standard.standard_attention`."""
        unused = {name: None for name in ("window_size", "softcap") if not getattr(self, name)}
        used = {name: getattr(self, name) for name in KEYWORDS}
        return used | unused | {"first_query": self.first_query}

    def seeded(self, device: torch.device) -> "AttentionOptions":
        """Options with the dropout seed as a tensor on the device (int64, one element), if any.

        If no seed was given, one is drawn from PyTorch's generator of the device. Activation
        checkpointing restores that generator before it recomputes a call. No path synchronizes.
        """
        seed = self.dropout_seed
        if not self.dropout_p:
            return self
        if isinstance(seed, Tensor):
            # Copy: callers may change their tensor before the backward pass. The & keeps all bits
            # of a valid seed; Inductor would drop a clone.
            seed = seed & (2**63 - 1)
        elif seed is None:
            seed = torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device)
        else:
            # Fill on the device: a copy from the host would synchronize.
            seed = torch.full((1,), seed, dtype=torch.int64, device=device)
        return self._replace(dropout_seed=seed)

    @property
    def has_tensors(self) -> bool:
        """Whether the call has a seed or a tensor of its own: one of the first fields."""
        return any([x is not None for x in self[:N_CALL_TENSORS]])  # noqa: C419  # faster

    def without_tensors(self) -> "AttentionOptions":
        """Options without the seed and tensors of the call; the lists of its mask stay."""
        if not self.has_tensors:
            return self
        # Every call does this, and _replace is slower.
        return AttentionOptions._make((*_NO_CALL_TENSORS, *self[N_CALL_TENSORS:]))

    def for_kernels(self, q: Tensor, k: Tensor, impl: str) -> "AttentionOptions":
        """Options for the kernels of `impl`: the mask is replaced by its lists."""
        if self.mask is None:
            return self
        return with_mask(self, self.mask, q, k, impl)._replace(mask=None)

    def for_operators(self, device: torch.device) -> "AttentionOptions":
        """Options with the seed, the sinks and the slopes in the form that kernels read."""
        options = self.seeded(device)
        if self.sinks is not None:
            options = options._replace(sinks=self.sinks.float().contiguous())
        if self.alibi_slopes is not None:
            slopes = self.alibi_slopes.float() / self.softmax_scale
            options = options._replace(alibi_slopes=slopes.contiguous())
        return options


KEYWORDS = (
    *("causal", "softmax_scale", "window_size", "mask", "doc_start", "kv_lengths", "sinks"),
    *("alibi_slopes", "softcap", "dropout_p", "dropout_seed"),
)
"""Keyword arguments of `kernels.flash_attention` that change its result."""

SCORE_OPTIONS = ("softmax_scale", "softcap")
"""Fields that change scores regardless of position, and so apply to a part of a sequence as is."""

# The fields begin with tensors: first those of the call, then the lists of a mask.
N_CALL_TENSORS = AttentionOptions._fields.index("mask_rows")
_NO_CALL_TENSORS = (None,) * N_CALL_TENSORS
N_TENSORS = AttentionOptions._fields.index("mask_block_size")
N_OPERATOR_OPTIONS = AttentionOptions._fields.index("first_query") + 1

_SCHEMA_TYPES = {Tensor | None: "Tensor?", int: "int", float: "float", bool: "bool"}

OPTIONS_SCHEMA = ", ".join(
    f"{_SCHEMA_TYPES.get(kind, 'Tensor?')} {name}"
    for name, kind in list(get_type_hints(AttentionOptions).items())[:N_OPERATOR_OPTIONS]
)
"""Schema of the operators' options, for torch.library."""


@dataclass(frozen=True)
class Features:
    """Which options are in use: a compile-time constant, so that unused ones cost nothing."""

    causal: bool = False
    window: bool = False
    documents: bool = False
    lengths: bool = False
    softcap: bool = False
    sinks: bool = False
    alibi: bool = False
    dropout: bool = False
    mask_block_size: int = 0
    packed: bool = False
    unmasked_loop: bool = True
    masked_loop: bool = True
    empty_rows: bool = False


_features = functools.cache(Features)


def with_mask(
    options: AttentionOptions, mask: BlockSparseMask, q: Tensor, k: Tensor, impl: str
) -> AttentionOptions:
    """Add the lists of `mask` to `options`, for q (B, T_q, H, D) and k (B, T_k, H_kv, D)."""
    lists = mask.lists(
        q.shape[1],
        k.shape[1],
        causal=options.causal,
        window_size=options.window_size or None,
        all_partial=options.doc_start is not None or options.kv_lengths is not None,
        # The query heads of a group share a program, and so must share the order of its columns.
        longest_column_first=not (mask.n_head > 1 and q.shape[2] > k.shape[2]),
        dq_schedule=impl == "hopper",
        # Row tiles of the Hopper kernels are one block of 64 or 128 rows.
        block_size=min(max(mask.block_size, 64), 128) if impl == "hopper" else None,
        device=q.device,
    )
    if not lists.hides:
        # The mask hides nothing, and dense attention is faster.
        return options
    loops = (UNMASKED_LOOP if lists.n_full else 0) | (MASKED_LOOP if lists.n_partial else 0)
    return options._replace(
        mask_rows=lists.rows, mask_row_blocks=lists.row_blocks, mask_cols=lists.cols,
        mask_col_blocks=lists.col_blocks, mask_col_ranges=lists.col_ranges,
        mask_visits=lists.visits, mask_cuts=lists.cuts,
        mask_block_size=lists.block_size, mask_packed=lists.packed,
        mask_loops=loops | (EMPTY_ROWS if lists.n_empty else 0),
    )  # fmt: skip


# ---- from the arguments of a call


def make_options(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, softmax_scale: float | None = None,
    window_size: int | None = None, mask: BlockSparseMask | None = None,
    doc_start: Tensor | None = None, kv_lengths: Tensor | None = None, sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None, softcap: float | None = None, dropout_p: float = 0.0,
    dropout_seed: Tensor | int | None = None, return_lse: bool = False,
    deterministic: bool = False, n_keys: int | None = None,
) -> AttentionOptions:  # fmt: skip
    """Check the arguments of `kernels.flash_attention` and convert them to `AttentionOptions`.

    Args:
        n_keys: number of keys in the whole sequence, if k holds only a part of it.

    Raises:
        ValueError: an argument is malformed.
    """
    check_bool("causal", causal)
    check_bool("return_lse", return_lse)
    check_bool("deterministic", deterministic)
    check_qkv(q, k, v)
    _check_numbers(softmax_scale, window_size, softcap, dropout_p)
    check_positions(q, doc_start, kv_lengths)
    check_sinks(q, sinks)
    check_slopes(q, alibi_slopes, softcap)
    check_mask(q, mask)
    check_dropout_seed(dropout_seed, q)
    n_keys = n_keys or k.shape[1]
    if window_size is not None and window_size >= max(q.shape[1], n_keys):
        window_size = None  # no key is that far from any query
    return AttentionOptions(
        dropout_seed=dropout_seed if dropout_p > 0 else None,
        doc_start=as_positions(q.shape[0], n_keys, doc_start),
        kv_lengths=as_positions(q.shape[0], n_keys, kv_lengths),
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        softmax_scale=softmax_scale or 1.0 / math.sqrt(q.shape[-1]),
        causal=plain_bool(causal),
        window_size=window_size or 0,
        softcap=softcap or 0.0,
        dropout_p=dropout_p,
        mask=mask,
        return_lse=return_lse,
        deterministic=deterministic,
    )


def as_positions(batch: int, n_keys: int, x: Tensor | None) -> Tensor | None:
    """Convert doc_start or kv_lengths to the form that kernels read: (B, ...) int32, contiguous."""
    if x is None:
        return None
    if x.shape[0] != batch:
        x = x.expand(batch, *x.shape[1:])
    if x.dtype == torch.int64:
        # Clamp first: int32 would wrap around at 2^31, and all positions past the keys are alike.
        x = x.clamp(0, n_keys).to(torch.int32)
    return x.contiguous()


def check_keywords(function: str, keywords: Mapping[str, object]) -> None:
    """Refuse keyword arguments of `function` that are not options of attention.

    Raises:
        TypeError: as Python raises for an unknown keyword, with our name for one of other packages.
    """
    for name in keywords:
        if name in KEYWORDS:
            continue
        ours = _EQUIVALENTS.get(name)
        advice = f"it takes {', '.join(KEYWORDS)} and arguments of its own"
        if ours is not None:
            advice = f"{ours} (docs/migrating.md)"
        raise TypeError(f"{function}() got an unexpected keyword argument {name!r}: {advice}")


_CU_SEQLENS = "pass doc_start, or call papilio.flash_attn.flash_attn_varlen_func"
_EQUIVALENTS = {
    "is_causal": "pass causal, which aligns at the bottom right if T_q != T_k",
    "scale": "pass softmax_scale",
    "attn_mask": "pass causal, window_size, doc_start, kv_lengths or a BlockSparseMask as mask",
    "attention_mask": "pass kv_lengths for padding, doc_start for packed documents",
    "key_padding_mask": "pass kv_lengths, the number of keys before the padding",
    "enable_gqa": "k and v may have fewer heads than q without it",
    **dict.fromkeys(("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k"), _CU_SEQLENS),
    **dict.fromkeys(("max_seqlen", "max_seqlen_q", "max_seqlen_k"), _CU_SEQLENS),
    "return_attn_probs": "pass return_lse for the log-sum-exp; the weights are never formed",
    "block_mask": "pass **BlockSparseMask.from_flex(block_mask)",
    "score_mod": "pass softcap or alibi_slopes; other changes to scores are not supported",
    "mask_mod": "pass causal, window_size or doc_start, or **BlockSparseMask.from_flex(block_mask)",
    **dict.fromkeys(("s_aux", "learnable_sink"), "pass sinks"),
    "sliding_window": "pass window_size, in keys that a query sees, itself included",
}
"""Advice for keyword arguments of PyTorch's SDPA and FlexAttention and of flash-attn."""


def _check_numbers(
    softmax_scale: float | None, window_size: int | None, softcap: float | None, dropout_p: float
) -> None:
    """Check types and ranges."""
    check_number("softmax_scale", softmax_scale, or_none=True)
    check_number("softcap", softcap, or_none=True)
    check_number("dropout_p", dropout_p)
    if softmax_scale is not None and not 0 < softmax_scale < math.inf:
        raise ValueError(f"softmax_scale must be positive and finite, got {softmax_scale}")
    if window_size is not None and not (is_whole_number(window_size) and window_size >= 1):
        raise ValueError(
            f"window_size must be the number of keys that a query sees, itself included: a whole "
            f"number of at least 1, got {window_size!r}. None means no window. flash-attn's (left, "
            "0) is causal=True, window_size=left + 1"
        )
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap must be positive and finite, got {softcap}. None means no cap")
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p must lie in [0, 1), got {dropout_p}")
