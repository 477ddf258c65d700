"""Description of a transformers model: names of its parameters, and fields of its config.json.

Does not import PyTorch, so that training can check a configuration before it loads it.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from model.config import ModelConfig

_MAX_CHARS = 60


class Choice(NamedTuple):
    """Setting of config.json for which our model implements only one function."""

    default: Any
    """Transformers' default, used if config.json lacks the setting."""
    allowed: tuple[Any, ...]
    """Values that can be imported. The first one is written on export."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Model class of transformers that computes the same function as some of our models."""

    name: str
    model_type: str
    architecture: str
    prefix: str
    """Prefix of all names except the head's. A checkpoint without the head lacks it."""
    heads: tuple[str, ...]
    """Names of the head's weight in different versions, without a prefix. A tied head repeats the
    embedding."""
    embedding: str
    """Name of the embedding's weight, without the prefix."""
    positions: str | None = None
    """Name of the table of learned positions, without the prefix; None if there is none."""
    norm: str
    """Name of the final normalisation, without the prefix."""
    block: Mapping[str, tuple[str, ...]]
    """Names of our layers in a block, and of the layers that share the rows of each, without the
    prefix and with {} for the index of the block."""
    transposed: bool = False
    """Whether linear weights are (in, out), as in Conv1D, instead of torch's (out, in)."""
    by_head: bool = False
    """Whether the QKV projection groups its rows by head, (H, 3, D). Ours are (3, H, D)."""
    always_biased: bool = False
    """Whether there are biases even if our model has none, which are then 0."""
    buffers: re.Pattern[str]
    """Names of buffers that older versions saved in addition to the parameters."""
    choices: Mapping[str, Choice]
    sizes: Mapping[str, str]
    """Whole numbers in config.json, and the corresponding fields of ModelConfig."""
    width: str
    """Name of the MLP's width in config.json."""
    width_default: int | None
    """Transformers' default for the MLP's width; None means four times n_embd."""
    eps: str
    """Name of `norm_eps` in config.json. Transformers has our default."""
    dropout: tuple[str, ...] = ()
    """Names of the rates for which our model has one, `dropout`. Without any, it is not exported,
    because it only affects training."""
    attention_dropout: str
    default_rate: float = 0.0
    fixed: Mapping[str, Any]
    """Fields of ModelConfig that must have a value other than the default."""
    exportable: frozenset[str]
    """Fields of ModelConfig that may have any value, in addition to `ALWAYS_EXPORTABLE`."""
    read: Callable[[Mapping[str, Any]], dict[str, Any]]
    """Read from config.json the fields of ModelConfig that are neither sizes nor rates."""
    write: Callable[[ModelConfig], dict[str, Any]]
    """Inverse of `read`."""


SIZES = {
    "vocab_size": "vocab_size",
    "max_position_embeddings": "context_length",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "hidden_size": "n_embd",
}
"""Fields of ModelConfig by their names in the config.json of most models."""

ALWAYS_EXPORTABLE = frozenset(
    {
        *("vocab_size", "context_length", "n_layer", "n_head", "n_embd", "n_inner", "norm_eps"),
        *("dropout", "attention_dropout", "mask", "context_schedule", "window_grows"),
        # These change results by rounding at most.
        *("vocab_multiple", "attention", "residual_in_fp32", "recompute_gelu"),
    }
)
"""Fields of ModelConfig that every layout can export, or checks itself."""


def config_error(name: str, value: Any, reason: str) -> ValueError:
    """Build the error for a value in config.json, and shorten a long value."""
    text = repr(value)
    shown = text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}..."
    return ValueError(f"config.json has {name}={shown}{reason}")


def read_size(hf: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """Read a whole number of config.json; `default` replaces a missing one, not null."""
    value = hf.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool):
        why = ", which must be a whole number: the sizes of a model cannot be guessed."
        raise config_error(name, value, why)
    return value


def read_number(name: str, value: Any, of: str) -> float:
    """Check a number of config.json; `of` names its owner in the error."""
    if type(value) not in (int, float) or not -1e30 < value < 1e30:
        raise config_error(name, value, f" of {of}: give a number.")
    return float(value)
