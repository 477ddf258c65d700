"""What a model of Hugging Face's must say of itself, for ours to be written as it and read from it.

Shapes: C n_embd, V vocab_size, T context_length.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from model.config import ModelConfig

_MOST_CHARS = 60


def unchanged(x: Tensor) -> Tensor:
    """x, as it lies the same way on both sides."""
    return x


class Pair(NamedTuple):
    """One parameter on both sides."""

    ours: str
    theirs: str
    shape: tuple[int, ...]
    """Of theirs."""
    to_theirs: Callable[[Tensor], Tensor] = unchanged
    to_ours: Callable[[Tensor], Tensor] = unchanged


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
    pairs: Callable[[ModelConfig], list[Pair]]


ANYWHERE = frozenset(
    {
        *("vocab_size", "context_length", "n_layer", "n_head", "n_embd"),
        *("dropout", "attention_dropout", "positions", "mask"),
        "bias",  # one of 0 is none
        *("vocab_multiple", "attention", "residual_in_fp32", "recompute_gelu"),  # at most rounding
    }
)
"""Fields of ModelConfig that any layout can write, or looks at itself."""


def shown(value: Any) -> str:
    """A value of somebody's config.json in an error, which a long one would fill."""
    text = repr(value)
    return text if len(text) <= _MOST_CHARS else f"{text[:_MOST_CHARS]}..."
