"""Weights of one model as the start of another, which may have another context length.

    python train.py configs/gpt2_small_4k.yaml run.init_from=out/gpt2_small_1k \
      run.out_dir=out/gpt2_small_1k_to_4k optim.max_steps=2000 optim.warmup_steps=100 optim.lr=1e-4

Learned positions are stretched over the longer context, and training makes use of those between.
Rotary positions are no weights: model.rope_scaling=4 stretches all of them, a larger
model.rope_base the slow frequencies alone.
Shapes: T0 tokens of context there, T1 here, C n_embd.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from model.config import ModelConfig

# What the weights are of. Dropout, how attention is computed and how far positions reach, a new
# run may choose.
MUST_AGREE = (
    "vocab_size",
    "vocab_multiple",
    "n_layer",
    "n_head",
    "n_embd",
    "n_kv_head",
    "qk_norm",
    "norm",
    "mlp",
    "positions",
    "bias",
    "scale_attn_by_inverse_layer_idx",
)
# How rotary positions are turned. Each run says it anew: another context may need other values.
ROTARY = ("rope_base", "rope_scaling")
_POSITIONS = "pos_emb.weight"


def differences(there: ModelConfig, here: ModelConfig) -> list[str]:
    """Why weights of a model `there` are none for one `here`: fields, as `differing` has them."""
    found = differing(MUST_AGREE, there, here)
    if there.context_length == here.context_length:
        # over the same context, positions turned otherwise are an oversight
        found += differing(ROTARY, there, here)
    return found


def differing(names: Sequence[str], there: ModelConfig, here: ModelConfig) -> list[str]:
    """Fields of these names that are not equal, with both values."""
    return [
        f"model.{name} is {getattr(there, name)!r} there and {getattr(here, name)!r} here"
        for name in names
        if getattr(there, name) != getattr(here, name)
    ]


def with_context_length(weights: dict[str, Tensor], context_length: int) -> dict[str, Tensor]:
    """The weights of a GPT by name, learned positions, if it has any, as many as asked for."""
    if _POSITIONS not in weights:
        return weights
    return weights | {_POSITIONS: extend_positions(weights[_POSITIONS], context_length)}


def extend_positions(table: Tensor, length: int) -> Tensor:
    """A table of learned positions for another context length.

    A longer one is interpolated linearly, as rotary positions are by Chen et al. 2023 (arXiv
    2306.15595): row i reads the old table at i T0 / T1. So row 0 stays row 0, rows at multiples of
    a whole T1 / T0 are old rows bit for bit, and what lies past the last old row repeats it. A
    shorter one is the first rows as they are, since those were trained for just these positions.

    From a table (T0, C) of any floating dtype comes a new one, (T1, C), of that dtype.
    """
    old_length = table.shape[0]
    if length <= old_length:
        return table[:length].clone()
    # whole numbers, because a rounded quotient could miss the row that it should hit
    at = torch.arange(length, device=table.device) * old_length
    below = at // length
    above = (below + 1).clamp(max=old_length - 1)
    exact = table.to(torch.promote_types(table.dtype, torch.float32))
    share = (at % length).to(exact.dtype) / length
    return torch.lerp(exact[below], exact[above], share[:, None]).to(table.dtype)
