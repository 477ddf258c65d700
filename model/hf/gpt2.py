"""Models with learned positions as transformers' GPT2LMHeadModel.

Its Conv1D stores a weight as (in, out), torch's Linear as (out, in).
"""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from model.config import ModelConfig
from model.hf.layout import Choice, Layout, Pair, unchanged

SCALED = "scale_attn_by_inverse_layer_idx"  # one name on both sides

# ours, theirs, and the shape of their weight in units of C: two sides are those of a Conv1D
_BLOCK = (
    ("ln_1", "ln_1", (1,)),
    ("attn.qkv_proj", "attn.c_attn", (1, 3)),
    ("attn.out_proj", "attn.c_proj", (1, 1)),
    ("ln_2", "ln_2", (1,)),
    ("mlp.fc_in", "mlp.c_fc", (1, 4)),
    ("mlp.fc_out", "mlp.c_proj", (4, 1)),
)


def _pairs(config: ModelConfig) -> list[Pair]:
    C = config.n_embd
    pairs = [
        Pair("tok_emb.weight", "wte.weight", (config.vocab_size, C)),
        Pair("pos_emb.weight", "wpe.weight", (config.context_length, C)),
        Pair("ln_f.weight", "ln_f.weight", (C,)),
        Pair("ln_f.bias", "ln_f.bias", (C,)),
    ]
    for layer in range(config.n_layer):
        for name, other, sides in _BLOCK:
            ours, theirs = f"blocks.{layer}.{name}", f"h.{layer}.{other}"
            shape = tuple(side * C for side in sides)
            turn = unchanged if len(shape) == 1 else Tensor.t
            pairs += [
                Pair(f"{ours}.weight", f"{theirs}.weight", shape, turn, turn),
                Pair(f"{ours}.bias", f"{theirs}.bias", shape[-1:]),
            ]
    return pairs


def _read(hf: Mapping[str, Any]) -> dict[str, Any]:
    scaled = hf.get(SCALED, False)
    if not isinstance(scaled, bool):
        raise ValueError(f"config.json has {SCALED}={scaled!r}, which must be true or false.")
    return {SCALED: scaled}


GPT2 = Layout(
    name="GPT-2",
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    prefix="transformer.",
    heads=("lm_head.weight",),
    embedding="wte.weight",
    # the causal mask, and what hidden scores were set to
    buffers=re.compile(r"h\.\d+\.attn\.(masked_)?bias"),
    choices={
        # two names of one function
        "activation_function": Choice("gelu_new", ("gelu_new", "gelu_pytorch_tanh")),
        "layer_norm_epsilon": Choice(1e-5, (1e-5,)),  # torch's default
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
    dropout=("embd_pdrop", "resid_pdrop"),
    attention_dropout="attn_pdrop",
    default_rate=0.1,
    free=frozenset({SCALED}),
    read=_read,
    write=lambda config: {SCALED: config.scale_attn_by_inverse_layer_idx},
    pairs=_pairs,
)
