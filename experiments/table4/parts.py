"""Parts of the modern recipe, and candidates for it: each is a model with one part less or more."""

from typing import NamedTuple


class Part(NamedTuple):
    """One part, whose effect is that of adding it to the recipe, or of removing it."""

    title: str
    overrides: tuple[str, ...]
    """Overrides that remove a part of the recipe, or add a candidate."""
    same_steps: bool = False
    """Whether a step is the same program with and without it, so that its time is not measured."""
    share: float = 1.0
    """Steps with it, as a share of those of the recipe, for as many tokens."""


PARTS = {
    "growing_context": Part(
        "context grows from 512 to 4K, and windows with it",
        (
            *("model.context_schedule=[]", "model.context_length=4096", "model.rope_scaling=none"),
            "model.window_grows=false",
        ),
    ),
    "shorter_first_context": Part(
        "context starts at 512 instead of 1K",
        ("model.context_schedule=[[1024,0.75],[4096,0.25]]",),
    ),
    "growing_windows": Part("windows grow with the context", ("model.window_grows=false",)),
    "windows": Part(
        "windows in three of four layers",
        ("model.window_size=null", "model.window_grows=false", "model.full_every=0"),
    ),
    "grouped_heads": Part("three query heads share keys and values", ("model.n_kv_head=null",)),
    "wide_heads": Part(
        "6 heads of 128 instead of 12 of 64", ("model.n_head=12", "model.n_kv_head=4")
    ),
    "rms_norm": Part("RMSNorm instead of LayerNorm", ("model.norm=layer_norm",)),
    "qk_norm": Part("queries and keys normalised", ("model.qk_norm=false",)),
    "softcap": Part("logits bounded by 15", ("model.logit_softcap=null",)),
    "orthogonal_updates": Part(
        "NorMuon instead of AdamW, with two rates",
        ("optim.name=adamw", "optim.adamw_lr=null"),
    ),
    "row_norms": Part("NorMuon instead of Muon", ("optim.name=muon",)),
    "adamw_lr": Part(
        "AdamW's learning rate above NorMuon's", ("optim.adamw_lr=null",), same_steps=True
    ),
}
"""Parts that the recipe has."""

CANDIDATES = {
    "swiglu": Part("SwiGLU instead of GELU", ("model.mlp=swiglu",)),
    "untied_head": Part("untied head", ("model.tie_embeddings=false",)),
    "doubling_context": Part(
        "context doubles from 256 to 4K",
        ("model.context_schedule=[[256,0.2],[512,0.2],[1024,0.2],[2048,0.2],[4096,0.2]]",),
    ),
    "growing_batch": Part(  # for the budget "minutes"
        "batch grows from 16,384 to 32,768 tokens",
        (
            *("optim.batch_schedule=[[16384,0.2],[32768,0.8]]", "optim.batch_tokens=32768"),
            "optim.micro_batch_size=4",
        ),
        share=1 / (0.2 / 2 + 0.8),
    ),
    "lower_lr": Part("learning rate of 2e-3 instead of 3e-3", ("optim.lr=2e-3",), same_steps=True),
    "higher_lr": Part("learning rate of 4e-3 instead of 3e-3", ("optim.lr=4e-3",), same_steps=True),
    **{
        f"adamw_lr_{lr}": Part(
            f"AdamW's learning rate {lr}", (f"optim.adamw_lr={lr}",), same_steps=True
        )
        for lr in ("2e-2", "4e-2")
    },
}
"""Parts that the recipe does not have."""

WITHOUT = {f"recipe_without_{name}": part for name, part in PARTS.items()}
WITH = {f"recipe_with_{name}": part for name, part in CANDIDATES.items()}
"""Models with one part less, and with one more, by name."""
NAMES = {name.split("_", 2)[2]: name for name in {**WITHOUT, **WITH}}
"""Model of each part, by the name of the part."""
PAIRS_OF_PARTS = (*(("recipe", name) for name in WITHOUT), *((name, "recipe") for name in WITH))
"""With a part, then without it: the difference is the effect of the part."""
