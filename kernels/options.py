"""What a call asks of the kernels beside q, k and v, as plain tensors and numbers."""

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple, get_type_hints

import torch
from torch import Tensor

from .call import AttentionCall
from .mask.block_mask import BlockSparseMask

# Kernels visit the tiles that need no mask in one loop, the others in another.
UNMASKED_LOOP, MASKED_LOOP = 1, 2
EMPTY_ROWS = 4  # and under a block-sparse mask some queries may see no block


class AttentionOptions(NamedTuple):
    """The options of one call, as the operators of kernels/ops.py take them, in their order.

    Meanings are those of `kernels.flash_attention`. The lists of a block-sparse mask are those of
    `kernels.mask.lists.MaskLists`: none, the first four, or for the Hopper kernels all there are.
    """

    dropout_seed: Tensor | None = None  # (2,) int64: seed, first query; needed for dropout_p > 0
    doc_start: Tensor | None = None  # (B, T_q) int32, contiguous
    kv_lengths: Tensor | None = None  # (B,) int32, contiguous
    sinks: Tensor | None = None  # (H,) fp32, contiguous
    mask_rows: Tensor | None = None
    mask_row_blocks: Tensor | None = None
    mask_cols: Tensor | None = None
    mask_col_blocks: Tensor | None = None
    mask_walks: Tensor | None = None
    mask_visits: Tensor | None = None
    mask_cuts: Tensor | None = None
    mask_block_size: int = 0  # of the lists, 0 without a mask
    mask_packed: bool = False
    mask_loops: int = UNMASKED_LOOP | MASKED_LOOP  # those that have a tile to visit
    softmax_scale: float = 1.0
    causal: bool = False
    window_size: int = 0  # 0 without a window
    softcap: float = 0.0  # 0 without a cap
    dropout_p: float = 0.0

    @property
    def features(self) -> "Features":
        """The part of the options that a kernel is compiled for."""
        return _features(
            causal=self.causal,
            window=self.window_size > 0,
            documents=self.doc_start is not None,
            lengths=self.kv_lengths is not None,
            softcap=self.softcap > 0.0,
            sinks=self.sinks is not None,
            dropout=self.dropout_p > 0.0,
            mask_block_size=self.mask_block_size,
            packed=self.mask_packed,
            unmasked_loop=self.mask_loops & UNMASKED_LOOP > 0,
            masked_loop=self.mask_loops & MASKED_LOOP > 0,
            empty_rows=self.mask_loops & EMPTY_ROWS > 0,
        )

    @property
    def softcap_scale(self) -> float:
        """What a product of q and k is multiplied by before its tanh is taken; 0 without a cap."""
        return self.softmax_scale / self.softcap if self.softcap else 0.0

    @property
    def scale_log2(self) -> float:
        """What turns a product of q and k, or with a cap that tanh, into a score in log2."""
        return (self.softcap or self.softmax_scale) * math.log2(math.e)

    @property
    def keep_scale(self) -> float:
        """What makes up for the probabilities that dropout drops."""
        return 1.0 / (1.0 - self.dropout_p)

    @property
    def drop_threshold(self) -> int:
        """A probability is dropped where its 32 random bits are below this."""
        return int(self.dropout_p * 2**32)


@dataclass(frozen=True)
class Features:
    """Which options are in use: a compile-time constant, so that unused ones cost nothing."""

    causal: bool = False
    window: bool = False
    documents: bool = False
    lengths: bool = False
    softcap: bool = False
    sinks: bool = False
    dropout: bool = False
    mask_block_size: int = 0
    packed: bool = False
    unmasked_loop: bool = True
    masked_loop: bool = True
    empty_rows: bool = False


_features = functools.cache(Features)


_SCHEMA_TYPES = {Tensor | None: "Tensor?", int: "int", float: "float", bool: "bool"}

OPTIONS_SCHEMA = ", ".join(
    f"{_SCHEMA_TYPES[kind]} {name}" for name, kind in get_type_hints(AttentionOptions).items()
)
"""The options in the language of torch.library, made from the fields of `AttentionOptions`."""


def make_options(call: AttentionCall, impl: str) -> AttentionOptions:
    """Build the options passed to the kernels of `impl`, which serve the call."""

    def positions(name: str) -> Tensor | None:
        tensor = arguments.get(name)
        if tensor is not None and tensor.dtype == torch.int64:
            # beyond the keys all mean the same, and past 2^31 they would wrap around
            tensor = tensor.clamp(0, call.k.shape[1])
        return None if tensor is None else tensor.to(torch.int32).contiguous()

    arguments = call.seeded()
    seed = arguments.get("dropout_seed")
    assert not isinstance(seed, int)
    if seed is not None:
        first_query = torch.full_like(seed, call.first_query)
        seed = torch.cat((seed.reshape(1), first_query.reshape(1)))
    sinks, window_size = arguments.get("sinks"), arguments.get("window_size")
    if window_size is not None and window_size >= max(call.q.shape[1], call.k.shape[1]):
        window_size = None  # no key is that far from any query
    options = AttentionOptions(
        dropout_seed=seed,
        doc_start=positions("doc_start"),
        kv_lengths=positions("kv_lengths"),
        sinks=None if sinks is None else sinks.float().contiguous(),
        softmax_scale=call.softmax_scale,
        causal=arguments.get("causal", False),
        window_size=window_size or 0,
        softcap=arguments.get("softcap") or 0.0,
        dropout_p=arguments.get("dropout_p", 0.0),
    )
    mask = arguments.get("mask")
    return options if mask is None else with_mask(options, mask, call.q, call.k, impl)


def with_mask(
    options: AttentionOptions, mask: BlockSparseMask, q: Tensor, k: Tensor, impl: str
) -> AttentionOptions:
    """`options` with the lists of `mask` for q (B, T_q, H, D) and k (B, T_k, H_kv, D)."""
    lists = mask.lists(
        q.shape[1],
        k.shape[1],
        causal=options.causal,
        window_size=options.window_size or None,
        all_partial=options.doc_start is not None or options.kv_lengths is not None,
        # The heads of a group share a program, and so the order of its columns.
        longest_column_first=not (mask.n_head > 1 and q.shape[2] > k.shape[2]),
        in_turns=impl == "hopper",
        # what a row tile may be there
        block_size=min(max(mask.block_size, 64), 128) if impl == "hopper" else None,
        device=q.device,
    )
    if not lists.hides:
        return options  # and no mask: dense attention costs less
    loops = (UNMASKED_LOOP if lists.n_full else 0) | (MASKED_LOOP if lists.n_partial else 0)
    return options._replace(
        mask_rows=lists.rows,
        mask_row_blocks=lists.row_blocks,
        mask_cols=lists.cols,
        mask_col_blocks=lists.col_blocks,
        mask_walks=lists.walks,
        mask_visits=lists.visits,
        mask_cuts=lists.cuts,
        mask_block_size=lists.block_size,
        mask_packed=lists.packed,
        mask_loops=loops | (EMPTY_ROWS if lists.n_empty else 0),
    )


class LossOptions(NamedTuple):
    """What the operators of `kernels.cross_entropy` are told beside tensors."""

    vocab_size: int
    """Rows of the weight that count; those from there on are padding."""
    softcap: float
    """0: none."""
    z_loss: float
    ignore_index: int
