"""Models of our Table 4, and their training budgets."""

from dataclasses import dataclass
from typing import Any

from experiments.table4.parts import WITH, WITHOUT

_BUTTERFLY = ("model.mask.pattern=butterfly",)
_OF_4K = ("data.consecutive_windows=4",)
_DOCUMENTS = ("data.document_mask=true",)
_LEARNED = ("model.positions=learned",)
_FROM_SCRATCH = (  # at 4K throughout
    *("model.context_schedule=[]", "model.context_length=4096", "model.rope_scaling=none"),
)
_GROWS = "model.context_schedule=[[1024,0.75],[4096,0.25]]"
_TO_4K = ("model.rope_scaling=ntk", _GROWS)
_TO_16K = (
    "model.rope_scaling=ntk",
    "model.context_schedule=[[1024,0.75],[4096,0.125],[16384,0.125]]",
)


@dataclass(frozen=True)
class Model:
    """A model to train; its YAML file is configs/RECIPE_CONTEXT.yaml."""

    context: str
    overrides: tuple[str, ...] = ()
    recipe: str = "paper/gpt2_small"
    starts_from: str | None = None
    """Model whose weights it starts from; the training time of that run counts as its own."""
    same_time_as: str | None = None
    """Model whose GPU-hours it is trained for, instead of the tokens of the budget."""
    share: float = 1.0
    """Share of the budget's steps."""


_RECIPE_LR = "optim.lr=3e-3"


def _recipe(*overrides: str, **settings: Any) -> Model:
    """The modern recipe, at the learning rate of short runs."""
    return Model("4k", (_RECIPE_LR, *overrides), recipe="modern_small", **settings)


_GROWING_BATCH = (  # for the budget "minutes_131k"
    "optim.batch_schedule=[[32768,0.25],[65536,0.25],[131072,0.5]]",
    "optim.batch_tokens=131072",
)
_MORE_STEPS = 1 / (0.25 / 4 + 0.25 / 2 + 0.5)  # for as many tokens in smaller steps


# 1k_of_4k sees the same tokens as 4k in the same order, with the history of 1k. It differs from 1k
# in the similarity of the sequences in a batch, and from 4k in attention only. 1k_to_4k grows its
# context within one run; 1k_to_4k_longer has as many tokens as 1k and 1k_then_4k together.
# 1k_to_4k_fixed_base has the base of ntk at 4K from the start.
# recipe_growing_batch_131k has more tokens at 4K than recipe, because its last steps are larger;
# with same_contexts it has as many.
MODELS = {
    "1k": Model("1k"),
    "1k_of_4k": Model("1k", _OF_4K),
    "2k": Model("2k"),
    "4k": Model("4k"),
    "8k": Model("8k"),
    "16k": Model("16k"),
    "1k_to_4k": Model("4k", _TO_4K),
    "1k_to_4k_longer": Model("4k", _TO_4K, share=4 / 3),
    "1k_to_4k_yarn": Model("4k", ("model.rope_scaling=yarn", _GROWS)),
    "1k_to_4k_fixed_base": Model("4k", ("model.rope_base=41829", _GROWS)),
    "1k_to_4k_wsd": Model("4k", (*_TO_4K, "optim.schedule=wsd")),
    "1k_to_16k": Model("16k", _TO_16K),
    "4k_butterfly": Model("4k", _BUTTERFLY),
    "16k_butterfly": Model("16k", _BUTTERFLY),
    "4k_butterfly_same_time": Model("4k", _BUTTERFLY, same_time_as="4k"),
    "16k_butterfly_same_time": Model("16k", _BUTTERFLY, same_time_as="16k"),
    "1k_same_time": Model("1k", same_time_as="4k"),
    "4k_from_1k": Model("4k", starts_from="1k", same_time_as="4k"),
    "1k_then_1k": Model("1k", starts_from="1k", share=1 / 3),
    "1k_then_1k_same_time": Model("1k", starts_from="1k", same_time_as="1k_then_4k"),
    "1k_then_1k_of_4k": Model("1k", _OF_4K, starts_from="1k", share=1 / 3),
    "1k_then_4k": Model("4k", starts_from="1k", share=1 / 3),
    "1k_then_4k_documents": Model("4k", _DOCUMENTS, starts_from="1k", share=1 / 3),
    "1k_then_16k": Model("16k", starts_from="1k", share=1 / 3),
    "1k_then_4k_butterfly": Model("4k", _BUTTERFLY, starts_from="1k", share=1 / 3),
    "1k_then_16k_butterfly": Model("16k", _BUTTERFLY, starts_from="1k", share=1 / 3),
    "1k_then_16k_butterfly_same_time": Model(
        "16k", _BUTTERFLY, starts_from="1k", same_time_as="1k_then_16k"
    ),
    "1k_documents": Model("1k", _DOCUMENTS),
    "4k_documents": Model("4k", _DOCUMENTS),
    "1k_learned": Model("1k", _LEARNED),
    "4k_learned": Model("4k", _LEARNED),
    "4k_learned_from_1k": Model(
        "4k", _LEARNED, starts_from="1k_learned", same_time_as="4k_learned"
    ),
    "4k_muon": Model("4k", ("optim.name=muon",)),
    "4k_modern": Model("4k", _FROM_SCRATCH, recipe="long"),
    "4k_modern_adamw": Model("4k", (*_FROM_SCRATCH, "optim.name=adamw"), recipe="long"),
    "4k_modern_same_time": Model("4k", _FROM_SCRATCH, recipe="long", same_time_as="4k"),
    "1k_to_4k_modern": Model("4k", recipe="long"),
    "4k_same_lr": Model("4k", (_RECIPE_LR,)),
    "recipe": _recipe(),
    "recipe_same_time": _recipe(same_time_as="4k"),
    "recipe_1k": Model("1k", (_RECIPE_LR,), recipe="modern_small"),
    "recipe_medium": Model("4k", ("optim.lr=2e-3",), recipe="modern_medium"),
    "recipe_growing_batch_131k": _recipe(*_GROWING_BATCH, share=_MORE_STEPS),
    "recipe_growing_batch_131k_same_contexts": _recipe(
        *_GROWING_BATCH,
        # shares of the steps with a quarter, half and quarter of the tokens
        "model.context_schedule=[[512,0.46875],[1024,0.359375],[4096,0.171875]]",
        share=_MORE_STEPS,
    ),
    **{
        name: _recipe(*part.overrides, share=part.share)
        for name, part in {**WITHOUT, **WITH}.items()
    },
}


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Size of a sweep, and the overrides that suit it."""

    steps: int
    batch_tokens: int
    seeds: int
    overrides: tuple[str, ...]
    models: tuple[str, ...] = ("1k", "2k", "4k", "8k", "16k", "4k_butterfly", "16k_butterfly")
    """Default models."""


# Short runs need many small steps and a high learning rate. They need no dropout, because they see
# little text more than once. Positions are rotary, because short runs cannot learn a table.
_SHORT = (
    *("model.positions=rotary", "model.scale_attn_by_inverse_layer_idx=false"),
    *("model.dropout=0", "model.attention_dropout=0"),
    *("optim.lr=1e-3", "optim.betas=[0.9,0.95]"),
)
_BILLION = ("1k", "1k_of_4k", "4k", "1k_to_4k", "1k_to_16k", "16k_butterfly")
_TINY = (
    *("model.n_layer=2", "model.n_head=2", "model.n_embd=32"),
    *("run.compile=false", "run.dtype=float32"),  # for a CPU
)

BUDGETS = {
    "smoke": Budget(
        steps=12, batch_tokens=4096, seeds=2, overrides=(*_SHORT, *_TINY), models=("1k", "2k")
    ),
    "minutes": Budget(steps=3_600, batch_tokens=32_768, seeds=3, overrides=_SHORT),
    "minutes_131k": Budget(
        steps=900, batch_tokens=131_072, seeds=1, overrides=_SHORT, models=("1k", "4k", "1k_to_4k")
    ),
    "hours": Budget(steps=2_200, batch_tokens=131_072, seeds=1, overrides=_SHORT),
    "billion": Budget(
        steps=7_630, batch_tokens=131_072, seeds=3, overrides=_SHORT, models=_BILLION
    ),
    "two_billion": Budget(
        steps=15_260,
        batch_tokens=131_072,
        seeds=1,
        overrides=_SHORT,
        models=("1k", "4k", "1k_to_4k"),
    ),
    "paper": Budget(steps=400_000, batch_tokens=524_288, seeds=1, overrides=()),
}
"""smoke: a test of the command on a CPU. minutes: 118M tokens. hours: 288M tokens, with four times
as many per step, so that a step of long windows also has many texts. minutes_131k, billion and
two_billion have steps of that size: 118M, 1.0B and 2.0B tokens. paper: 210B tokens, as in arXiv
2205.14135, appendix E.2."""
