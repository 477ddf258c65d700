"""Layouts of transformers' LlamaForCausalLM and Qwen3ForCausalLM, for modern models.

Both have rotary positions, RMSNorm, SwiGLU and grouped heads. Qwen3 also normalises queries and
keys, and its layers may have sliding windows, whose width counts the token itself as ours does.
"""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from model.config import ModelConfig
from model.hf.layout import SIZES, Choice, Layout, config_error, read_size
from model.hf.rope import read_rope, write_rope

_ROPE = {"base": "rope_theta", "share": "partial_rotary_factor"}
_FULL, _SLIDING = "full_attention", "sliding_attention"


def _read_shape(
    hf: Mapping[str, Any], *, kv_heads: int | None, head_dim: int | None
) -> dict[str, Any]:
    """Read the number of key and value heads, the width of a head, and whether the head is tied.

    Args:
        hf: contents of config.json, whose sizes are valid.
        kv_heads, head_dim: transformers' defaults; None means that of the queries, and the width
            of the model over the number of heads.
    """
    n_head = hf["num_attention_heads"]
    tied = hf.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        raise config_error("tie_word_embeddings", tied, ", which must be true or false.")
    found: dict[str, Any] = {"n_kv_head": None, "head_size": None, "tie_embeddings": tied}
    if hf.get("num_key_value_heads", kv_heads) is not None:
        n_kv_head = read_size(hf, "num_key_value_heads", kv_heads)
        found["n_kv_head"] = None if n_kv_head == n_head else n_kv_head
    if hf.get("head_dim", head_dim) is not None:
        head_size = read_size(hf, "head_dim", head_dim)
        found["head_size"] = None if head_size * n_head == hf["hidden_size"] else head_size
    return found


def _write_shape(config: ModelConfig) -> dict[str, Any]:
    return {
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "tie_word_embeddings": config.tie_embeddings,
    }


def _read_llama(hf: Mapping[str, Any]) -> dict[str, Any]:
    biases = {name: hf.get(name, False) for name in ("attention_bias", "mlp_bias")}
    if biases not in (dict.fromkeys(biases, False), dict.fromkeys(biases, True)):
        why = f" and mlp_bias={biases['mlp_bias']!r}, which must both be true or both be false."
        raise config_error("attention_bias", biases["attention_bias"], why)
    return {
        **_read_shape(hf, kv_heads=None, head_dim=None),
        **read_rope(hf, **_ROPE, default_share=1.0),
        "bias": bool(biases["attention_bias"]),
    }


def _write_llama(config: ModelConfig) -> dict[str, Any]:
    return {
        **_write_shape(config),
        **write_rope(config, **_ROPE),
        **dict.fromkeys(("attention_bias", "mlp_bias"), config.bias),
    }


def _read_qwen3(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_read_shape(hf, kv_heads=32, head_dim=128),
        **read_rope(hf, **_ROPE, default_share=1.0),
        **_read_windows(hf),
    }


def _write_qwen3(config: ModelConfig) -> dict[str, Any]:
    types = [_FULL if config.attends_to_all(n) else _SLIDING for n in range(config.n_layer)]
    return {
        **_write_shape(config),
        **write_rope(config, **_ROPE),
        "use_sliding_window": _SLIDING in types,
        "sliding_window": config.window_size,
        # Versions without layer_types: the layers from this one on have a window.
        "max_window_layers": config.n_layer if _FULL in types else 0,
        "layer_types": types,
    }


def _read_windows(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Read `window_size` and `full_every` from the types of the layers."""
    n_layer = hf["num_hidden_layers"]
    window = hf.get("sliding_window", 4096) if hf.get("use_sliding_window", False) else None
    no_other = f", and in this model all layers slide, or all but every N-th: no other {_FULL!r} "
    no_other += "layers can be imported."
    types = hf.get("layer_types")
    if types is None:  # versions without it
        n_full = read_size(hf, "max_window_layers", 28)
        if window is None or n_full >= n_layer:
            return {"window_size": None, "full_every": 0}
        if n_full > 0:
            raise config_error("max_window_layers", n_full, no_other)
        return {"window_size": read_size(hf, "sliding_window", 4096), "full_every": 0}
    known = isinstance(types, list) and all(kind in (_FULL, _SLIDING) for kind in types)
    if not known or len(types) != n_layer:
        why = f", which must be {n_layer} times {_FULL!r} or {_SLIDING!r}."
        raise config_error("layer_types", types, why)
    if _SLIDING not in types:
        return {"window_size": None, "full_every": 0}
    if window is None:
        why = ", and layers with a sliding window need use_sliding_window=true and a width."
        raise config_error("sliding_window", hf.get("sliding_window"), why)
    n = types.index(_FULL) + 1 if _FULL in types else 0
    if types != [_FULL if n and (i + 1) % n == 0 else _SLIDING for i in range(n_layer)]:
        raise config_error("layer_types", types, no_other)
    return {"window_size": read_size(hf, "sliding_window", 4096), "full_every": n}


_BLOCK = {
    "ln_1": ("layers.{}.input_layernorm",),
    "attn.qkv_proj": tuple(f"layers.{{}}.self_attn.{name}_proj" for name in "qkv"),
    "attn.out_proj": ("layers.{}.self_attn.o_proj",),
    "ln_2": ("layers.{}.post_attention_layernorm",),
    "mlp.fc_in": ("layers.{}.mlp.gate_proj", "layers.{}.mlp.up_proj"),
    "mlp.fc_out": ("layers.{}.mlp.down_proj",),
}
_FIXED = {"positions": "rotary", "norm": "rms_norm", "mlp": "swiglu"}
_EXPORTABLE = frozenset(
    {"n_kv_head", "head_size", "tie_embeddings", "rope_base", "rope_scaling", "rope_factor"}
)
_CHOICES = {"hidden_act": Choice("silu", ("silu",))}

_modern = partial(
    Layout,
    prefix="model.",
    heads=("lm_head.weight",),
    embedding="embed_tokens.weight",
    norm="norm",
    buffers=re.compile(r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"),
    sizes=SIZES,
    width="intermediate_size",
    eps="rms_norm_eps",
    attention_dropout="attention_dropout",
)

LLAMA = _modern(
    name="Llama",
    model_type="llama",
    architecture="LlamaForCausalLM",
    block=_BLOCK,
    choices=_CHOICES,
    width_default=11_008,
    fixed=_FIXED,
    exportable=_EXPORTABLE | {"bias"},
    read=_read_llama,
    write=_write_llama,
)
QWEN3 = _modern(
    name="Qwen3",
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    block=_BLOCK | {f"attn.{x}_norm": (f"layers.{{}}.self_attn.{x}_norm",) for x in "qk"},
    choices={**_CHOICES, "attention_bias": Choice(False, (False,))},
    width_default=22_016,
    fixed={**_FIXED, "qk_norm": True, "bias": False},
    exportable=_EXPORTABLE | {"window_size", "full_every"},
    read=_read_qwen3,
    write=_write_qwen3,
)
