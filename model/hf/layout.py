"""Parameter names, shapes and config.json fields of a transformers model for import and export.

Shapes: C n_embd, V vocab_size, T context_length.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from model.config import ModelConfig

_MAX_CHARS = 60
_BLOCK = {
    **{"ln_1": (1,), "attn.qkv_proj": (3, 1), "attn.out_proj": (1, 1)},
    **{"ln_2": (1,), "mlp.fc_in": (4, 1), "mlp.fc_out": (1, 4)},
}
"""Layers of our block, and the shapes of their weights in units of C."""


def _unchanged(x: Tensor) -> Tensor:
    return x


def _regroup(x: Tensor, groups: tuple[int, int]) -> Tensor:
    """Reorder rows from (a, b, D) to (b, a, D)."""
    return x.unflatten(0, (*groups, -1)).transpose(0, 1).flatten(0, 2)


class Conversion(NamedTuple):
    """Conversion of one parameter between our model and transformers' model."""

    name: str
    hf_name: str
    hf_shape: tuple[int, ...]
    to_hf: Callable[[Tensor], Tensor] = _unchanged
    from_hf: Callable[[Tensor], Tensor] = _unchanged


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
    """Names of the head's weight in different versions. A tied head repeats the embedding."""
    embedding: str
    """Name of the embedding's weight, without the prefix."""
    positions: str | None
    """Name of the table of learned positions, without the prefix; None if there is none."""
    norm: str
    """Name of the final normalisation, without the prefix."""
    block: tuple[str, ...]
    """Names of the layers in `_BLOCK`, with {} for the index of the block."""
    transposed: bool = False
    """Whether linear weights are (in, out), as in Conv1D, instead of torch's (out, in)."""
    by_head: bool = False
    """Whether the QKV projection groups its rows by head, (H, 3, D). Ours are (3, H, D)."""
    buffers: re.Pattern[str]
    """Names of buffers that older versions saved in addition to the parameters."""
    choices: Mapping[str, Choice]
    sizes: Mapping[str, str]
    """Whole numbers in config.json, and the corresponding fields of ModelConfig."""
    width: str
    """Name of the MLP's width in config.json."""
    width_default: int | None
    """Transformers' default for the MLP's width; None means four times n_embd."""
    dropout: tuple[str, ...]
    """Names of the rates for which our model has one, `dropout`."""
    attention_dropout: str
    default_rate: float
    exportable: frozenset[str]
    """Fields of ModelConfig that may have any value, in addition to `ALWAYS_EXPORTABLE`."""
    read: Callable[[Mapping[str, Any]], dict[str, Any]]
    """Read from config.json the fields of ModelConfig that are neither sizes nor rates."""
    write: Callable[[ModelConfig], dict[str, Any]]
    """Inverse of `read`."""

    def conversions(self, config: ModelConfig) -> list[Conversion]:
        """List the conversions of all parameters of a model."""
        C, H = config.n_embd, config.n_head
        conversions = [Conversion("tok_emb.weight", self.embedding, (config.vocab_size, C))]
        if self.positions is not None:
            conversions.append(
                Conversion("pos_emb.weight", self.positions, (config.context_length, C))
            )
        for kind in ("weight", "bias"):
            conversions.append(Conversion(f"ln_f.{kind}", f"{self.norm}.{kind}", (C,)))
        by_head = partial(_regroup, groups=(3, H)), partial(_regroup, groups=(H, 3))
        for layer in range(config.n_layer):
            for (layer_name, sides), hf_layer in zip(_BLOCK.items(), self.block, strict=True):
                name, hf_name = f"blocks.{layer}.{layer_name}", hf_layer.format(layer)
                converters = by_head if self.by_head and layer_name == "attn.qkv_proj" else ()
                shape, weight_converters = tuple(side * C for side in sides), converters
                if self.transposed and len(shape) == 2:
                    shape, weight_converters = shape[::-1], (Tensor.t, Tensor.t)
                conversions += [
                    Conversion(f"{name}.weight", f"{hf_name}.weight", shape, *weight_converters),
                    Conversion(f"{name}.bias", f"{hf_name}.bias", (sides[0] * C,), *converters),
                ]
        return conversions


ALWAYS_EXPORTABLE = frozenset(
    {
        *("vocab_size", "context_length", "n_layer", "n_head", "n_embd"),
        *("dropout", "attention_dropout", "positions", "mask"),
        "bias",  # a bias of 0 equals no bias
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
