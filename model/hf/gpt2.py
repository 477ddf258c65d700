"""Layout of transformers' GPT2LMHeadModel, for models with learned positions.

Its Conv1D stores weights as (in, out), torch's Linear as (out, in).
"""

import re
from collections.abc import Mapping
from typing import Any

from model.hf.layout import Choice, Layout, config_error

SCALED = "scale_attn_by_inverse_layer_idx"  # the same name in both configurations


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
    scaled = hf.get(SCALED, False)
    if not isinstance(scaled, bool):
        raise config_error(SCALED, scaled, ", which must be true or false.")
    return {SCALED: scaled}


GPT2 = Layout(
    name="GPT-2",
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    prefix="transformer.",
    heads=("lm_head.weight",),
    embedding="wte.weight",
    positions="wpe.weight",
    norm="ln_f",
    block={
        "ln_1": ("h.{}.ln_1",),
        "attn.qkv_proj": ("h.{}.attn.c_attn",),
        "attn.out_proj": ("h.{}.attn.c_proj",),
        "ln_2": ("h.{}.ln_2",),
        "mlp.fc_in": ("h.{}.mlp.c_fc",),
        "mlp.fc_out": ("h.{}.mlp.c_proj",),
    },
    transposed=True,
    always_biased=True,
    # the causal mask, and the score of masked positions
    buffers=re.compile(r"h\.\d+\.attn\.(masked_)?bias"),
    choices={
        # two names of the same function
        "activation_function": Choice("gelu_new", ("gelu_new", "gelu_pytorch_tanh")),
        "scale_attn_weights": Choice(True, (True,)),
        "add_cross_attention": Choice(False, (False,)),
        "tie_word_embeddings": Choice(True, (True,)),
    },
    sizes={
        "vocab_size": "vocab_size",
        "n_positions": "context_length",
        "n_layer": "n_layer",
        "n_head": "n_head",
        "n_embd": "n_embd",
    },
    width="n_inner",
    width_default=None,
    eps="layer_norm_epsilon",
    dropout=("embd_pdrop", "resid_pdrop"),
    attention_dropout="attn_pdrop",
    default_rate=0.1,
    fixed={},
    exportable=frozenset({SCALED, "bias"}),
    read=_read,
    write=lambda config: {SCALED: config.scale_attn_by_inverse_layer_idx},
)
