"""The shape of a model and what its layers do. This needs no PyTorch."""

import math
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from kernels.limits import BLOCK_SIZES, MAX_HEAD_DIM, MAX_VOCAB_SIZE

if TYPE_CHECKING:
    from kernels.block_mask import BlockSparseMask

Attention = Literal["auto", "hopper", "triton", "sdpa", "reference", "unfused"]

DEFAULT_ROPE_BASE = 10_000.0

GPT2_SIZES: dict[str, dict[str, Any]] = {
    "small": {"n_layer": 12, "n_head": 12, "n_embd": 768},  # 124M
    "medium": {"n_layer": 24, "n_head": 16, "n_embd": 1024},  # 355M
    "large": {"n_layer": 36, "n_head": 20, "n_embd": 1280},  # 774M
    "xl": {"n_layer": 48, "n_head": 25, "n_embd": 1600},  # 1558M
}
"""GPT-2 as released (Radford et al. 2019); use as `ModelConfig(**GPT2_SIZES["medium"])`."""

# Far above what is trained anywhere, and low enough that nothing is allocated for a slip.
MAX_WIDTH = 2**20
MAX_CONTEXT = 2**30  # positions are int32 in the kernels


@dataclass(frozen=True, kw_only=True)
class MaskConfig:
    """Which keys a layer visits: all that the causal mask leaves, or a butterfly of blocks of them.

    The butterfly is that of block-sparse FlashAttention (arXiv 2205.14135, section 3.3), with a
    window and global blocks added by OR. Under a causal mask the butterfly alone leaves some blocks
    that no path of layers connects (block 2 sees neither 1 nor a block that does); a window of two
    mends that. All fields but `pattern` matter to a butterfly only.

    Raises:
        ValueError: a field that no mask can be built from.
    """

    pattern: Literal["dense", "butterfly"] = "dense"
    """Which keys attention visits. dense: all, or all up to the query where it is causal.
    butterfly: block i of queries sees the blocks of keys whose number differs from i in at most one
    bit, those of the window, and the global ones; on long sequences it is far cheaper."""

    block_size: int = 128
    """Butterfly only: tokens in a block, 16, 32, 64, 128 or 256."""

    window_blocks: int = 2
    """Butterfly only: block i also sees the window_blocks - 1 blocks before it; 1 adds none."""

    global_blocks: int = 1
    """Butterfly only: so many blocks, the first ones, are seen by all; 0 for none."""

    def __post_init__(self) -> None:
        check_choices(self, "model.mask")
        if self.block_size not in BLOCK_SIZES:
            raise ValueError(
                f"model.mask.block_size={self.block_size} must be one of "
                f"{', '.join(map(str, BLOCK_SIZES))}."
            )
        for name, least in (("window_blocks", 1), ("global_blocks", 0)):
            if getattr(self, name) < least:
                raise ValueError(
                    f"model.mask.{name}={getattr(self, name)} must be at least {least}."
                )

    def build(self, seq_len: int, *, last_query_only: bool = False) -> "BlockSparseMask | None":
        """The mask for seq_len queries and keys, the same object each time; None if dense.

        With `last_query_only`, as generation asks for it, one for the last of the queries alone.
        """
        if self.pattern == "dense":
            return None
        return _butterfly(self, -(-seq_len // self.block_size), last_query_only)

    def density(self, seq_len: int, *, causal: bool) -> float:
        """The share of dense attention's (query, key) pairs that the mask keeps."""
        mask = self.build(seq_len)
        return 1.0 if mask is None else mask.density(seq_len, seq_len, causal=causal)


@cache
def _butterfly(config: MaskConfig, n_blocks: int, last_query_only: bool) -> "BlockSparseMask":
    # here, as a configuration is checked before PyTorch is loaded
    from kernels.block_mask import BlockSparseMask
    from kernels.patterns import butterfly, sliding_window

    layout = butterfly(n_blocks, global_blocks=min(config.global_blocks, n_blocks))
    layout |= sliding_window(n_blocks, config.window_blocks)
    return BlockSparseMask(layout[-1:] if last_query_only else layout, config.block_size)


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """The stack of blocks that a GPT and a classifier share.

    Raises:
        ValueError: a field, or two fields together, that no model can be built from.
    """

    n_layer: int = 12
    """Transformer blocks, one after the other."""

    n_head: int = 12
    """Attention heads in a block. Each is n_embd / n_head wide, which must be a whole number of at
    most 256."""

    n_embd: int = 768
    """Width of the residual stream: numbers that stand for one token between two blocks."""

    dropout: float = 0.0
    """Dropout rate of the embeddings and of what each layer adds to the residual stream, from 0 to
    below 1."""

    attention_dropout: float = 0.0
    """Dropout rate of the attention probabilities, from 0 to below 1."""

    attention: Attention = "auto"
    """Who computes attention. auto: our kernels on a GPU, PyTorch's on a CPU where it serves.
    triton: our kernels, on a GPU. sdpa: PyTorch's. reference: ours in plain PyTorch, anywhere.
    unfused: as before FlashAttention, with all scores in memory."""

    mask: MaskConfig = field(default_factory=MaskConfig)
    """Dense attention, or a butterfly of blocks."""

    recompute_gelu: bool = True
    """Compute the MLP's GELU again in the backward pass rather than keep it: less memory, at the
    price of one more write in a pass over it."""

    bias: bool = True
    """Whether the blocks' linear layers, and LayerNorms, add a bias, as GPT-2's do. Without one, as
    nanoGPT trains, a step is a little faster."""

    scale_attn_by_inverse_layer_idx: bool = False
    """Divide the attention scores of block i (from 0) by i + 1, as Mistral's GPT-2 recipe does."""

    def __post_init__(self) -> None:
        check_positive(self, "model", "n_layer", "n_head", most=10_000)
        check_positive(self, "model", "n_embd", most=MAX_WIDTH)
        for name in ("dropout", "attention_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(
                    f"model.{name}={getattr(self, name)} is a rate: it must be at least 0 and "
                    "below 1."
                )
        check_choices(self, "model")
        if self.n_embd % self.n_head:
            raise ValueError(
                f"model.n_embd={self.n_embd} must be divisible by model.n_head={self.n_head}: "
                "every head takes an equal share of the width."
            )
        if self.head_dim > MAX_HEAD_DIM:
            raise ValueError(
                f"model.n_embd={self.n_embd} over model.n_head={self.n_head} gives heads of "
                f"{self.head_dim}, and the attention kernels take at most {MAX_HEAD_DIM}: "
                f"raise model.n_head to {math.ceil(self.n_embd / MAX_HEAD_DIM)} or more."
            )
        if self.mask.pattern != "dense" and self.attention in ("sdpa", "unfused"):
            raise ValueError(
                f"model.mask.pattern={self.mask.pattern} with model.attention={self.attention}: it "
                "knows no block masks, use model.attention=auto or triton."
            )

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.n_embd // self.n_head

    @property
    def mlp_width(self) -> int:
        """Width of the MLP between its two layers: GPT-2's four times n_embd."""
        return 4 * self.n_embd


@dataclass(frozen=True, kw_only=True)
class ModelConfig(BlockConfig):
    """A GPT-2 style decoder; the defaults are GPT-2 small.

    Raises:
        ValueError: a field, or two fields together, that no model can be built from.
    """

    vocab_size: int = 50_257
    """Token ids that the model knows, and logits that it gives. Leave it out of a configuration:
    training takes as many as the tokenizer of data.path has."""

    vocab_multiple: int = 64
    """The embedding table is padded to a multiple of this many rows, because GPUs multiply such
    shapes faster. Padding never appears in the logits; 1 turns it off."""

    context_length: int = 1024
    """Tokens in a training sequence; with learned positions also the longest the model accepts."""

    positions: Literal["learned", "rotary"] = "learned"
    """How the model knows where a token stands. learned: a vector for each position, as in GPT-2.
    rotary: queries and keys are turned by their position (RoPE)."""

    residual_in_fp32: bool = False
    """Where activations are in bfloat16, keep what all layers add up to in float32 all the same,
    as autocast alone does: a step then takes longer, and more memory."""

    rope_base: float = DEFAULT_ROPE_BASE
    """Rotary only: the slowest frequencies turn once in about 2 pi times this many tokens. A larger
    one prepares a trained model for longer contexts (Xiong et al. 2023, arXiv 2309.16039)."""

    rope_scaling: float = 1.0
    """Rotary only: positions are divided by this. New context over trained context keeps them
    within the range of training (position interpolation, Chen et al. 2023, arXiv 2306.15595)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "model", "vocab_size", most=MAX_VOCAB_SIZE)
        check_positive(self, "model", "vocab_multiple", most=65_536)
        check_positive(self, "model", "context_length", most=MAX_CONTEXT)
        if self.positions == "rotary":
            self._check_rotary()
        else:
            for name, default in (("rope_base", DEFAULT_ROPE_BASE), ("rope_scaling", 1.0)):
                if getattr(self, name) != default:
                    raise ValueError(
                        f"model.{name}={getattr(self, name)} has no effect with model.positions="
                        f"{self.positions}: leave it out, or set model.positions=rotary."
                    )

    def _check_rotary(self) -> None:
        if self.head_dim % 2:
            raise ValueError(
                f"model.n_embd={self.n_embd} over model.n_head={self.n_head} gives heads of "
                f"{self.head_dim}, and model.positions=rotary turns pairs: choose an even size."
            )
        if not 1.0 < self.rope_base < math.inf:
            raise ValueError(
                f"model.rope_base={self.rope_base} must be a finite number above 1; "
                f"{DEFAULT_ROPE_BASE:.0f} is usual."
            )
        if not 1.0 <= self.rope_scaling < math.inf:
            raise ValueError(
                f"model.rope_scaling={self.rope_scaling} must be a finite number of at least 1; "
                "1 leaves the positions alone."
            )

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding table: vocab_size, rounded up to vocab_multiple."""
        return math.ceil(self.vocab_size / self.vocab_multiple) * self.vocab_multiple


def check_positive(config: Any, prefix: str, *names: str, most: int = 10**12) -> None:
    """Refuse fields of `config` below 1, or above what can be meant."""
    for name in names:
        value = getattr(config, name)
        if value < 1:
            raise ValueError(f"{prefix}.{name}={value} must be at least 1.")
        if value > most:
            raise ValueError(f"{prefix}.{name}={value} must be at most {most:,}.")


def check_choices(config: Any, prefix: str) -> None:
    """Refuse a field of `config` that is none of its Literal's values."""
    for name, kind in get_type_hints(type(config)).items():
        choices, value = get_args(kind), getattr(config, name)
        if get_origin(kind) is Literal and value not in choices:
            raise ValueError(f"{prefix}.{name}={value!r} must be one of {', '.join(choices)}.")
