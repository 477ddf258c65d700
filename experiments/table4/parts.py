"""Parts of the modern recipe, and candidates for it: each is a model with one part less or more."""

from typing import NamedTuple


class Part(NamedTuple):
    """One part, whose effect is that of adding it to the recipe, or of removing it."""

    title: str
    overrides: tuple[str, ...]
    """Overrides that remove a part of the recipe, or add a candidate."""
    same_steps: bool = False
    """Whether a step is the same program with and without it, so that its time is not measured."""


PARTS = {
    "growing_context": Part(
        "context grows from 1K to 4K",
        ("model.context_schedule=[]", "model.context_length=4096", "model.rope_scaling=none"),
    ),
    "windows": Part(
        "windows of 1,024 in three of four layers",
        ("model.window_size=null", "model.full_every=0"),
    ),
    "grouped_heads": Part("three query heads share keys and values", ("model.n_kv_head=null",)),
    "rms_norm": Part("RMSNorm instead of LayerNorm", ("model.norm=layer_norm",)),
    "qk_norm": Part("queries and keys normalised", ("model.qk_norm=false",)),
    "relu_squared": Part("squared ReLU instead of GELU", ("model.mlp=gelu",)),
    "softcap": Part("logits bounded by 15", ("model.logit_softcap=null",)),
    "orthogonal_updates": Part("NorMuon instead of AdamW", ("optim.name=adamw",)),
    "row_norms": Part("NorMuon instead of Muon", ("optim.name=muon",)),
}
"""Parts that the recipe has."""

CANDIDATES = {
    "swiglu": Part("SwiGLU instead of squared ReLU", ("model.mlp=swiglu",)),
    "value_embeddings": Part(
        "value embeddings in every second layer", ("model.value_embedding_every=2",)
    ),
    "smear": Part("smear: the previous token's embedding, gated", ("model.smear=true",)),
    "growing_windows": Part("windows grow with the context", ("model.window_grows=true",)),
    "untied_head": Part("untied head", ("model.tie_embeddings=false",)),
    "wide_heads": Part(
        "6 heads of 128 instead of 12 of 64", ("model.n_head=6", "model.n_kv_head=2")
    ),
    "shorter_first_context": Part(
        "context from 512 to 1K to 4K",
        ("model.context_schedule=[[512,0.25],[1024,0.5],[4096,0.25]]",),
    ),
    "zero_init": Part("blocks start as the identity", ("model.zero_init=true",), same_steps=True),
    "lower_lr": Part("learning rate of 2e-3 instead of 3e-3", ("optim.lr=2e-3",), same_steps=True),
    "lower_adamw_lr": Part(
        "AdamW's learning rate 1e-3 instead of 3e-3", ("optim.adamw_lr=1e-3",), same_steps=True
    ),
    "higher_adamw_lr": Part(
        "AdamW's learning rate 1e-2 instead of 3e-3", ("optim.adamw_lr=1e-2",), same_steps=True
    ),
    "higher_lr": Part("learning rate of 4e-3 instead of 3e-3", ("optim.lr=4e-3",), same_steps=True),
}
"""Parts that the recipe does not have."""

WITHOUT = {f"recipe_without_{name}": part for name, part in PARTS.items()}
WITH = {f"recipe_with_{name}": part for name, part in CANDIDATES.items()}
"""Models with one part less, and with one more, by name."""
NAMES = {name.split("_", 2)[2]: name for name in {**WITHOUT, **WITH}}
"""Model of each part, by the name of the part."""
PAIRS_OF_PARTS = (*(("recipe", name) for name in WITHOUT), *((name, "recipe") for name in WITH))
"""With a part, then without it: the difference is the effect of the part."""
