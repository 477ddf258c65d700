"""Configuration of a stack of blocks: heads, windows, norms. Does not load PyTorch."""

import math
from dataclasses import dataclass, field
from typing import Literal

from kernels.limits import MAX_HEAD_DIM
from model.checks import check_choices, check_positive
from model.mask_config import MaskConfig

Attention = Literal["auto", "hopper", "triton", "sdpa", "reference", "eager"]

NORM_EPS = {"layer_norm": 1e-5, "rms_norm": 1e-6}

# Far above any model that is trained, but low enough to catch a typo before memory is allocated.
MAX_WIDTH = 2**20
MAX_CONTEXT = 2**30  # positions are int32 in the kernels


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """Settings of the stack of blocks, common to GPTs and classifiers.

    Raises:
        ValueError: a field is invalid, or two fields contradict each other.
    """

    n_layer: int = 12
    """Transformer blocks, one after the other."""
    n_head: int = 12
    """Attention heads per block. They must divide n_embd, unless head_size is set."""
    n_embd: int = 768
    """Width of the residual stream: features per token."""
    dropout: float = 0.0
    """Dropout rate of the embeddings and of each layer's output, from 0 to below 1."""
    attention_dropout: float = 0.0
    """Dropout rate of the attention probabilities, from 0 to below 1."""
    attention: Attention = "auto"
    """Implementation of attention. auto: our kernels on a GPU, PyTorch's on a CPU if it supports
    the call. hopper: our kernels for H100 and H200. triton: our portable kernels, on a GPU. sdpa:
    PyTorch's. reference: ours in plain PyTorch, anywhere. eager: with all scores in memory, as
    before FlashAttention."""
    n_kv_head: int | None = None
    """Number of key and value heads (grouped-query attention): n_head / n_kv_head query heads share
    each one, which makes the cache smaller. null: n_head."""
    head_size: int | None = None
    """Width of one attention head, at most 256. null: n_embd / n_head."""
    window_size: int | None = None
    """Sliding window: tokens that a token attends to, itself and earlier ones. If attention is not
    causal, the same number on either side, itself counted on both. null: no window."""
    full_every: int = 0
    """Every N-th layer attends to all tokens, without window_size and mask: 4 is three layers with
    them, then one without. 0: all layers have them."""
    qk_norm: bool = False
    """Normalise the queries and keys of each head (RMSNorm), which bounds the scores."""
    norm: Literal["layer_norm", "rms_norm"] = "layer_norm"
    """Normalisation of each layer's input: LayerNorm, or RMSNorm, which does not subtract the mean
    or add a bias."""
    mlp: Literal["gelu", "swiglu"] = "gelu"
    """MLP between its linear layers: GELU, or SwiGLU at a width with about as many parameters
    (Shazeer 2020, arXiv 2002.05202)."""
    n_inner: int | None = None
    """Width of the MLP between its linear layers. null: 4 n_embd, and for SwiGLU two thirds of
    that, rounded up to a multiple of 64."""
    norm_eps: float | None = None
    """Added to the variance (RMSNorm: the mean square) in all normalisations, above 0. null: 1e-5
    in LayerNorm, 1e-6 in RMSNorm."""
    mask: MaskConfig = field(default_factory=MaskConfig)
    """Dense attention, or a block-sparse pattern."""
    recompute_gelu: bool = True
    """GELU only: recompute it in the backward pass instead of storing it. This saves memory, at the
    price of one extra write of the MLP's activations."""
    bias: bool = True
    """Use biases in the blocks' linear layers and LayerNorms, as GPT-2 does. Without them, as in
    nanoGPT, a step is slightly faster."""
    scale_attn_by_inverse_layer_idx: bool = False
    """Divide the attention scores of block i (from 0) by i + 1, as Mistral's GPT-2 recipe does."""

    def __post_init__(self) -> None:
        check_positive(self, "model", "n_layer", "n_head", most=10_000)
        check_positive(self, "model", "n_embd", most=MAX_WIDTH)
        for name in ("dropout", "attention_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(
                    f"model.{name}={getattr(self, name)} is a rate: it must be at least 0 and "
                    "less than 1."
                )
        check_choices(self, "model")
        if self.head_size is not None:
            check_positive(self, "model", "head_size", most=MAX_HEAD_DIM)
        elif self.n_embd % self.n_head:
            raise ValueError(
                f"model.n_embd={self.n_embd} must be divisible by model.n_head={self.n_head}: "
                "all heads have the same width."
            )
        elif self.head_dim > MAX_HEAD_DIM:
            raise ValueError(
                f"model.n_embd={self.n_embd} over model.n_head={self.n_head} gives heads of "
                f"{self.head_dim}, and the attention kernels support at most {MAX_HEAD_DIM}: "
                f"raise model.n_head to {math.ceil(self.n_embd / MAX_HEAD_DIM)} or more."
            )
        if self.attention in ("sdpa", "eager"):
            for name, value, default in (
                ("mask.pattern", self.mask.pattern, "dense"),
                ("window_size", self.window_size, None),
            ):
                if value != default:
                    raise ValueError(
                        f"model.{name}={value} is not supported with model.attention="
                        f"{self.attention}: use model.attention=auto or triton."
                    )
        self._check_heads_and_windows()
        if self.n_inner is not None:
            check_positive(self, "model", "n_inner", most=4 * MAX_WIDTH)
        if self.norm_eps is not None and not 0 < self.norm_eps < 1:
            raise ValueError(
                f"model.norm_eps={self.norm_eps} must be above 0 and below 1. Try 1e-6, or leave "
                "it out."
            )

    def _check_heads_and_windows(self) -> None:
        if self.n_kv_head is not None and (self.n_kv_head < 1 or self.n_head % self.n_kv_head != 0):
            raise ValueError(
                f"model.n_kv_head={self.n_kv_head} must divide model.n_head={self.n_head}: all key "
                "and value heads serve the same number of query heads."
            )
        if self.window_size is not None:
            check_positive(self, "model", "window_size", most=MAX_CONTEXT)
        if self.full_every < 0 or self.full_every == 1:
            raise ValueError(
                f"model.full_every={self.full_every} must be 0, or at least 2: every N-th layer "
                "attends to all tokens."
            )
        if self.full_every and self.window_size is None and self.mask.pattern == "dense":
            raise ValueError(
                f"model.full_every={self.full_every} has no effect, because all layers attend to "
                "all tokens: leave it out, or set model.window_size or model.mask.pattern."
            )

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.n_embd // self.n_head if self.head_size is None else self.head_size

    @property
    def attention_width(self) -> int:
        """Width of the queries, and of attention's output, of all heads together."""
        return self.n_head * self.head_dim

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.n_head if self.n_kv_head is None else self.n_kv_head

    @property
    def mlp_width(self) -> int:
        """Width of the MLP between its linear layers: n_inner, or its default."""
        if self.n_inner is not None:
            return self.n_inner
        if self.mlp == "swiglu":
            return -(-8 * self.n_embd // (3 * 64)) * 64
        return 4 * self.n_embd

    def _head_size_text(self) -> str:
        """Origin of the width of a head, for messages."""
        if self.head_size is not None:
            return f"model.head_size={self.head_size} gives heads of {self.head_size}"
        return (
            f"model.n_embd={self.n_embd} over model.n_head={self.n_head} gives heads of "
            f"{self.head_dim}"
        )

    def eps(self, norm: Literal["layer_norm", "rms_norm"]) -> float:
        """Return what a normalisation of this kind adds to the variance: norm_eps or a default."""
        return NORM_EPS[norm] if self.norm_eps is None else self.norm_eps

    def attends_to_all(self, layer: int) -> bool:
        """Return whether a layer, counted from 0, has neither a window nor a mask."""
        if self.full_every and (layer + 1) % self.full_every == 0:
            return True
        return self.window_size is None and self.mask.pattern == "dense"
