"""What a model of Hugging Face's must say of itself, for ours to be written as it and read from it.

Shapes: C n_embd, V vocab_size, T context_length.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from model.config import ModelConfig

_MOST_CHARS = 60
_BLOCK = {
    **{"ln_1": (1,), "attn.qkv_proj": (3, 1), "attn.out_proj": (1, 1)},
    **{"ln_2": (1,), "mlp.fc_in": (4, 1), "mlp.fc_out": (1, 4)},
}
"""Layers of a block of ours, and the shapes of their weights in units of C."""


def _unchanged(x: Tensor) -> Tensor:
    return x


def _regroup(x: Tensor, groups: tuple[int, int]) -> Tensor:
    """Rows in (a, b, D) order in (b, a, D) order."""
    return x.unflatten(0, (*groups, -1)).transpose(0, 1).flatten(0, 2)


class Pair(NamedTuple):
    """One parameter on both sides."""

    ours: str
    theirs: str
    shape: tuple[int, ...]
    """Of theirs."""
    to_theirs: Callable[[Tensor], Tensor] = _unchanged
    to_ours: Callable[[Tensor], Tensor] = _unchanged


class Choice(NamedTuple):
    """A setting of theirs that our model has one value of."""

    default: Any
    """What transformers takes where config.json does not say."""
    allowed: tuple[Any, ...]
    """What it can be, the first being what is written."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A model of transformers that computes what some of ours do."""

    name: str
    model_type: str
    architecture: str
    prefix: str
    """Of all names but the head's; a checkpoint of the model without its head lacks it."""
    heads: tuple[str, ...]
    """Names that versions give to the head's weight; where it is tied, the embedding's again."""
    embedding: str
    """The embedding's weight, without the prefix."""
    positions: str | None
    """The table of learned positions, without the prefix."""
    norm: str
    """The last normalisation, without the prefix."""
    block: tuple[str, ...]
    """Names of the layers of `_BLOCK`, with {} for the number of the block."""
    transposed: bool = False
    """Whether linear layers have weights of (in, out), as Conv1D, where torch's have (out, in)."""
    by_head: bool = False
    """Whether the projection to q, k and v has the three of a head together, (H, 3, D), where ours
    has all queries first, (3, H, D)."""
    buffers: re.Pattern[str]
    """What older versions saved beside the parameters."""
    choices: Mapping[str, Choice]
    sizes: Mapping[str, str]
    """Whole numbers of a config.json, and the fields of ModelConfig that they are."""
    width: str
    """The width of the MLP, in config.json."""
    width_default: int | None
    """What transformers takes where it is not there; None is four times n_embd."""
    dropout: tuple[str, ...]
    """Rates of what our `dropout` is one rate for."""
    attention_dropout: str
    default_rate: float
    free: frozenset[str]
    """Fields of ModelConfig, beside those of `ANYWHERE`, that may have any value in an export."""
    read: Callable[[Mapping[str, Any]], dict[str, Any]]
    """Of config.json, the fields of ModelConfig that are neither sizes nor rates."""
    write: Callable[[ModelConfig], dict[str, Any]]
    """The same the other way."""

    def pairs(self, config: ModelConfig) -> list[Pair]:
        """All parameters of a model."""
        C, H = config.n_embd, config.n_head
        pairs = [Pair("tok_emb.weight", self.embedding, (config.vocab_size, C))]
        if self.positions is not None:
            pairs.append(Pair("pos_emb.weight", self.positions, (config.context_length, C)))
        pairs += [Pair(f"ln_f.{kind}", f"{self.norm}.{kind}", (C,)) for kind in ("weight", "bias")]
        by_head = partial(_regroup, groups=(3, H)), partial(_regroup, groups=(H, 3))
        for layer in range(config.n_layer):
            for (name, sides), other in zip(_BLOCK.items(), self.block, strict=True):
                ours, theirs = f"blocks.{layer}.{name}", other.format(layer)
                moves = by_head if self.by_head and name == "attn.qkv_proj" else ()
                shape, weight_moves = tuple(side * C for side in sides), moves
                if self.transposed and len(shape) == 2:
                    shape, weight_moves = shape[::-1], (Tensor.t, Tensor.t)
                pairs += [
                    Pair(f"{ours}.weight", f"{theirs}.weight", shape, *weight_moves),
                    Pair(f"{ours}.bias", f"{theirs}.bias", (sides[0] * C,), *moves),
                ]
        return pairs


ANYWHERE = frozenset(
    {
        *("vocab_size", "context_length", "n_layer", "n_head", "n_embd"),
        *("dropout", "attention_dropout", "positions", "mask"),
        "bias",  # one of 0 is none
        *("vocab_multiple", "attention", "residual_in_fp32", "recompute_gelu"),  # at most rounding
    }
)
"""Fields of ModelConfig that any layout can write, or looks at itself."""


def config_error(name: str, value: Any, reason: str) -> ValueError:
    """The error for a value of somebody's config.json, which a long one would fill."""
    text = repr(value)
    shown = text if len(text) <= _MOST_CHARS else f"{text[:_MOST_CHARS]}..."
    return ValueError(f"config.json has {name}={shown}{reason}")
