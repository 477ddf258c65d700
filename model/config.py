"""Configuration of a GPT. Importing it does not load PyTorch."""

import math
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

from kernels.limits import MAX_VOCAB_SIZE
from model.block_config import MAX_CONTEXT, BlockConfig
from model.checks import check_positive

DEFAULT_ROPE_BASE = 10_000.0

GPT2_SIZES: dict[str, dict[str, Any]] = {
    "small": {"n_layer": 12, "n_head": 12, "n_embd": 768},  # 124M
    "medium": {"n_layer": 24, "n_head": 16, "n_embd": 1024},  # 355M
    "large": {"n_layer": 36, "n_head": 20, "n_embd": 1280},  # 774M
    "xl": {"n_layer": 48, "n_head": 25, "n_embd": 1600},  # 1558M
}
"""GPT-2 as released (Radford et al. 2019); use as `ModelConfig(**GPT2_SIZES["medium"])`."""


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
    context_length: int = 1024
    """Tokens in a training sequence; with learned positions also the longest the model accepts."""
    context_schedule: list[list[int | float]] = field(default_factory=list, hash=False)
    """Contexts of a run and their shares of its steps, shortest first: [[1024, 0.75], [4096,
    0.25]] trains with sequences of 1,024 tokens for three quarters of the steps, then with 4,096.
    The tokens of a step do not depend on the context. The last context is context_length, and every
    validation uses it. []: context_length throughout."""
    window_grows: bool = False
    """With context_schedule, let window_size grow with the context: a stage at a quarter of
    context_length has a quarter of the window. Validation always has the whole one."""
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
        if self.context_schedule:
            self._check_context_schedule()
        if self.window_grows and (self.window_size is None or len(self.contexts) == 1):
            raise ValueError(
                "model.window_grows=true has no effect without model.window_size and a growing "
                "model.context_schedule: set both, or leave it out."
            )
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
        window = self.window_size
        if self.window_grows and window is not None:
            window = max(1, window * context_length // self.context_length)
        return replace(
            self,
            context_length=context_length,
            context_schedule=[],
            window_size=window,
            window_grows=False,
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
