"""Layout of transformers' GPTNeoXForCausalLM, for models with rotary positions.

With use_parallel_residual=False and rotary_pct=1, a GPT-NeoX is a GPT-2 with rotary positions. Its
QKV projection groups rows by head, (H, 3, D). Ours has all queries first, (3, H, D).
"""

import re
from functools import partial

from model.hf.layout import SIZES, Choice, Layout
from model.hf.rope import read_rope, write_rope

_ROPE = {"base": "rotary_emb_base", "share": "rotary_pct"}

GPT_NEOX = Layout(
    name="GPT-NeoX",
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    prefix="gpt_neox.",
    heads=("embed_out.weight", "lm_head.weight"),
    embedding="embed_in.weight",
    norm="final_layer_norm",
    block={
        "ln_1": ("layers.{}.input_layernorm",),
        "attn.qkv_proj": ("layers.{}.attention.query_key_value",),
        "attn.out_proj": ("layers.{}.attention.dense",),
        "ln_2": ("layers.{}.post_attention_layernorm",),
        "mlp.fc_in": ("layers.{}.mlp.dense_h_to_4h",),
        "mlp.fc_out": ("layers.{}.mlp.dense_4h_to_h",),
    },
    by_head=True,
    always_biased=True,
    buffers=re.compile(r"layers\.\d+\.attention\.((masked_)?bias|rotary_emb\.inv_freq)"),
    choices={
        "hidden_act": Choice("gelu", ("gelu_new", "gelu_pytorch_tanh")),
        "use_parallel_residual": Choice(True, (False,)),
        "attention_bias": Choice(True, (True,)),
        "tie_word_embeddings": Choice(False, (True,)),
    },
    sizes=SIZES,
    width="intermediate_size",
    width_default=24_576,
    eps="layer_norm_eps",
    dropout=("hidden_dropout",),
    attention_dropout="attention_dropout",
    fixed={"positions": "rotary"},
    exportable=frozenset({"rope_base", "rope_scaling", "rope_factor", "bias"}),
    read=partial(read_rope, **_ROPE, default_share=0.25),
    write=partial(write_rope, **_ROPE),
)
