"""Model configuration: sizes, layers and attention. Importing it does not load PyTorch."""

import math
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

from kernels.limits import MAX_HEAD_DIM, MAX_VOCAB_SIZE
from model.checks import check_choices, check_positive
from model.mask_config import MaskConfig

Attention = Literal["auto", "hopper", "triton", "sdpa", "reference", "eager"]

DEFAULT_ROPE_BASE = 10_000.0
NORM_EPS = {"layer_norm": 1e-5, "rms_norm": 1e-6}

GPT2_SIZES: dict[str, dict[str, Any]] = {
    "small": {"n_layer": 12, "n_head": 12, "n_embd": 768},  # 124M
    "medium": {"n_layer": 24, "n_head": 16, "n_embd": 1024},  # 355M
    "large": {"n_layer": 36, "n_head": 20, "n_embd": 1280},  # 774M
    "xl": {"n_layer": 48, "n_head": 25, "n_embd": 1600},  # 1558M
}
"""GPT-2 as released (Radford et al. 2019); use as `ModelConfig(**GPT2_SIZES["medium"])`."""

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
    mlp: Literal["gelu", "swiglu", "relu_squared"] = "gelu"
    """MLP between its linear layers: GELU, SwiGLU at a width with about as many parameters (Shazeer
    2020, arXiv 2002.05202), or the square of a ReLU (So et al. 2021, arXiv 2109.08668)."""
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


@dataclass(frozen=True, kw_only=True)
class ModelConfig(BlockConfig):
    """A decoder; the defaults are GPT-2 small.

    Raises:
        ValueError: a field is invalid, or two fields contradict each other.
    """

    vocab_size: int = 50_257
    """Number of token ids and logits. Leave it out of a configuration: training uses the vocabulary
    size of data.path's tokenizer."""
    vocab_multiple: int = 64
    """Pad the embedding table to a multiple of this many rows, because GPUs multiply such shapes
    faster. Padding never appears in the logits; 1 turns it off."""
    tie_embeddings: bool = True
    """Use the token embedding as the head, as GPT-2 does. false: the head has a table of its own,
    of the same size."""
    logit_softcap: float | None = None
    """Bound the logits softly: c replaces a logit x by c tanh(x / c), as Gemma 2 does (arXiv
    2408.00118). null: no bound."""
    value_embedding_every: int = 0
    """In every N-th layer, add a learned vector of the token to its values: a table as wide as the
    values of these layers (modded-nanogpt; Zhou et al. 2024, arXiv 2410.17897). 0: in none."""
    smear: bool = False
    """Add to each token's embedding that of the previous token, times a learned gate (nanochat)."""
    context_length: int = 1024
    """Tokens in a training sequence; with learned positions also the longest the model accepts."""
    context_schedule: list[list[int | float]] = field(default_factory=list, hash=False)
    """Contexts of a run and their shares of its tokens, shortest first: [[1024, 0.75], [4096,
    0.25]] trains with sequences of 1,024 tokens for three quarters of the tokens, then with 4,096.
    A step has the same number of tokens throughout. The last context is context_length, and every
    validation uses it. []: context_length throughout."""
    positions: Literal["learned", "rotary"] = "learned"
    """Position embedding. learned: a vector for each position, as in GPT-2. rotary: queries and
    keys are rotated by their position (RoPE)."""
    residual_in_fp32: bool = False
    """Keep the residual stream in float32 even if activations are bfloat16, as autocast alone does.
    A step then takes more time and memory."""
    rope_base: float = DEFAULT_ROPE_BASE
    """Rotary only: the slowest frequencies turn once in about 2 pi times this many tokens. A larger
    base prepares a trained model for longer contexts (Xiong et al. 2023, arXiv 2309.16039)."""
    rope_scaling: Literal["none", "linear", "ntk", "yarn"] = "none"
    """Rotary only: scale positions that were trained on a shorter context, by rope_factor. linear:
    divide them (position interpolation). ntk: raise rope_base, so that the slowest pair turns as
    far as before. yarn: divide the slow frequencies only, and sharpen attention. none: not at
    all. With context_schedule, each stage has the factor of its context."""
    rope_factor: float = 1.0
    """With rope_scaling: context_length over the context for which the positions were trained. With
    context_schedule, by default the last context over the first."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "model", "vocab_size", most=MAX_VOCAB_SIZE)
        check_positive(self, "model", "vocab_multiple", most=65_536)
        check_positive(self, "model", "context_length", most=MAX_CONTEXT)
        if self.logit_softcap is not None and not 0 < self.logit_softcap < math.inf:
            raise ValueError(
                f"model.logit_softcap={self.logit_softcap} must be a finite number above 0. Try "
                "15, or leave it out."
            )
        if not 0 <= self.value_embedding_every <= self.n_layer:
            raise ValueError(
                f"model.value_embedding_every={self.value_embedding_every} must be at least 0 and "
                f"at most model.n_layer={self.n_layer}. Try 2, every second layer."
            )
        if self.context_schedule:
            self._check_context_schedule()
        if self.positions == "rotary":
            self._check_rotary()
        else:
            for name, default in (
                ("rope_base", DEFAULT_ROPE_BASE),
                ("rope_scaling", "none"),
                ("rope_factor", 1.0),
            ):
                if getattr(self, name) != default:
                    raise ValueError(
                        f"model.{name}={getattr(self, name)} has no effect with model.positions="
                        f"{self.positions}: leave it out, or set model.positions=rotary."
                    )

    def _check_context_schedule(self) -> None:
        text = f"model.context_schedule={self.context_schedule}"
        example = "for example [[1024, 0.75], [4096, 0.25]]"
        if any(len(stage) != 2 for stage in self.context_schedule):
            raise ValueError(f"{text} must be pairs of a context and its share, {example}.")
        contexts = [context for context, _ in self.context_schedule]
        shares = [share for _, share in self.context_schedule]
        if not all(type(context) is int and context > 0 for context in contexts):
            raise ValueError(f"{text} must start each pair with a number of tokens, {example}.")
        if any(short >= long for short, long in pairwise(contexts)):
            raise ValueError(f"{text} must have contexts that grow, {example}.")
        if contexts[-1] != self.context_length:
            raise ValueError(
                f"{text} must end with model.context_length={self.context_length}. Try "
                f"model.context_length={contexts[-1]}, or model.context_schedule="
                f"[[{self.context_length},1]] for one context throughout."
            )
        if any(self.context_length % context for context in contexts):
            raise ValueError(
                f"{text} must have contexts that divide the last one, {self.context_length}: "
                f"{example}."
            )
        in_range = all(0 < share <= 1 for share in shares)
        if not in_range or not math.isclose(sum(shares), 1, abs_tol=1e-6):
            raise ValueError(
                f"{text} has shares {', '.join(map(str, shares))}: each must be above 0, and their "
                f"sum must be 1, {example}."
            )
        if self.positions != "rotary" and len(contexts) > 1:
            raise ValueError(
                f"{text} needs model.positions=rotary: learned positions after the first "
                f"{contexts[0]} would stay untrained until the context grows."
            )

    def at_context(self, context_length: int) -> "ModelConfig":
        """Return this configuration at one context, without a schedule: what a stage computes."""
        factor = max(1.0, self.rope_factor * context_length / self.context_length)
        scaling = self.rope_scaling if factor > 1 else "none"
        return replace(
            self,
            context_length=context_length,
            context_schedule=[],
            rope_scaling=scaling,
            rope_factor=factor,
        )

    @property
    def contexts(self) -> list[int]:
        """Context lengths of training, in order; the last one is context_length."""
        schedule = self.context_schedule or [[self.context_length, 1.0]]
        return [int(context) for context, _ in schedule]

    def _check_rotary(self) -> None:
        if self.head_dim % 2:
            raise ValueError(
                f"{self._head_size_text()}, and model.positions=rotary rotates pairs: choose an "
                "even size."
            )
        if not 1.0 < self.rope_base < math.inf:
            raise ValueError(
                f"model.rope_base={self.rope_base} must be a finite number above 1. Try "
                f"{DEFAULT_ROPE_BASE:.0f}."
            )
        if self.rope_scaling == "none" and self.rope_factor != 1.0:
            raise ValueError(
                f"model.rope_factor={self.rope_factor} has no effect with model.rope_scaling=none: "
                "leave it out, or set model.rope_scaling=yarn."
            )
        # One context throughout, as a schedule, is trained without scaling.
        least = 1.0 if len(self.context_schedule) == 1 else math.nextafter(1.0, 2.0)
        if self.rope_scaling != "none" and not least <= self.rope_factor < math.inf:
            raise ValueError(
                f"model.rope_factor={self.rope_factor} must be a finite number above 1 with "
                f"model.rope_scaling={self.rope_scaling}: model.context_length over the context "
                f"for which the positions were trained. {self._rope_factor_hint()}"
            )
        if self.rope_scaling == "ntk" and self.head_dim == 2:
            raise ValueError(
                f"{self._head_size_text()}, and model.rope_scaling=ntk needs more than one pair: "
                "choose a larger size, or model.rope_scaling=linear."
            )

    def _rope_factor_hint(self) -> str:
        first = self.contexts[0]
        if self.context_schedule:
            return f"model.context_schedule begins at {first}: try {self.context_length / first:g}."
        return (
            "If that is the same, set model.rope_scaling=none. If the context grows during the "
            "run, set model.context_schedule."
        )

    @property
    def scaled_rope_base(self) -> float:
        """Base of the rotary frequencies: rope_base, raised by model.rope_scaling=ntk."""
        if self.rope_scaling != "ntk":
            return self.rope_base
        # b s^(D / (D - 2)) in YaRN (arXiv 2309.00071, section 3.1): the slowest pair, which turns
        # by b^(-(D - 2) / D) radians per token, turns as far over s times the tokens.
        D = self.head_dim
        return self.rope_base * self.rope_factor ** (D / (D - 2))

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding table: vocab_size, rounded up to a multiple of vocab_multiple."""
        return math.ceil(self.vocab_size / self.vocab_multiple) * self.vocab_multiple

    @property
    def token_rows(self) -> int:
        """Rows of the token embedding and, if it is not tied to it, of the head."""
        return self.padded_vocab_size * (1 if self.tie_embeddings else 2)

    @property
    def value_layers(self) -> list[int]:
        """Layers with a value embedding."""
        every = self.value_embedding_every
        return [layer for layer in range(self.n_layer) if every and (layer + 1) % every == 0]

    @property
    def value_embedding_width(self) -> int:
        """Width of the table of value embeddings, of all layers together."""
        return len(self.value_layers) * self.kv_heads * self.head_dim

    @property
    def table_params(self) -> int:
        """Parameters of all tables of tokens, with padding: embedding, head, value embeddings."""
        return self.token_rows * self.n_embd + self.padded_vocab_size * self.value_embedding_width
