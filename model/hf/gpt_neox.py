"""Layout of transformers' GPTNeoXForCausalLM, for models with rotary positions.

With use_parallel_residual=False and rotary_pct=1, a GPT-NeoX is a GPT-2 with rotary positions. Its
QKV projection groups rows by head, (H, 3, D). Ours has all queries first, (3, H, D).
"""

import re
from collections.abc import Mapping
from typing import Any

from model.config import DEFAULT_ROPE_BASE, ModelConfig
from model.hf.layout import Choice, Layout, config_error


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Read the settings of rotary positions, in the format of transformers 5 or an older one."""
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise config_error("rope_parameters", rope, ", which must be an object.")
    share = rope.get("partial_rotary_factor", hf.get("rotary_pct", 0.25))
    if share != 1:
        why = ", and this model rotates whole heads: only rotary_pct=1 can be imported."
        raise config_error("rotary_pct", share, why)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear"):
        why = ", and this model can only scale positions by one factor ('default' and 'linear')."
        raise config_error("rope_type", kind, why)
    return {
        "positions": "rotary",
        "rope_base": _number(
            "rope_theta", rope.get("rope_theta", hf.get("rotary_emb_base", DEFAULT_ROPE_BASE))
        ),
        "rope_scaling": _number("factor", rope.get("factor")) if kind == "linear" else 1.0,
    }


def _number(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not -1e30 < value < 1e30:
        raise config_error(name, value, " of rotary positions: give a number.")
    return float(value)


def _write(config: ModelConfig) -> dict[str, Any]:
    """Write the settings that `_read` reads, in both formats."""
    scaled = config.rope_scaling != 1.0
    factor: dict[str, Any] = {"factor": config.rope_scaling} if scaled else {}
    kind = "linear" if scaled else "default"
    return {
        "rotary_pct": 1.0,
        "rotary_emb_base": config.rope_base,
        "rope_scaling": {"type": kind, "rope_type": kind, **factor} if scaled else None,
        "rope_parameters": {
            "rope_type": kind,
            "rope_theta": config.rope_base,
            "partial_rotary_factor": 1.0,
            **factor,
        },
    }


GPT_NEOX = Layout(
    name="GPT-NeoX",
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    prefix="gpt_neox.",
    heads=("embed_out.weight", "lm_head.weight"),
    embedding="embed_in.weight",
    positions=None,
    norm="final_layer_norm",
    block=(
        *("layers.{}.input_layernorm", "layers.{}.attention.query_key_value"),
        *("layers.{}.attention.dense", "layers.{}.post_attention_layernorm"),
        *("layers.{}.mlp.dense_h_to_4h", "layers.{}.mlp.dense_4h_to_h"),
    ),
    by_head=True,
    buffers=re.compile(r"layers\.\d+\.attention\.((masked_)?bias|rotary_emb\.inv_freq)"),
    choices={
        "hidden_act": Choice("gelu", ("gelu_new", "gelu_pytorch_tanh")),
        "layer_norm_eps": Choice(1e-5, (1e-5,)),
        "use_parallel_residual": Choice(True, (False,)),
        "attention_bias": Choice(True, (True,)),
        "tie_word_embeddings": Choice(False, (True,)),
    },
    sizes={
        "vocab_size": "vocab_size",
        "max_position_embeddings": "context_length",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "hidden_size": "n_embd",
    },
    width="intermediate_size",
    width_default=24_576,
    dropout=("hidden_dropout",),
    attention_dropout="attention_dropout",
    default_rate=0.0,
    exportable=frozenset({"rope_base", "rope_scaling"}),
    read=_read,
    write=_write,
)
