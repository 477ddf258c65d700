"""Initialise a model with the weights of another one, which may have another context length.

    python train.py configs/paper/gpt2_small_4k.yaml run.init_from=out/gpt2_small_1k \
      run.out_dir=out/gpt2_small_1k_to_4k optim.max_steps=2000 optim.warmup_steps=100 optim.lr=1e-4

Learned positions are interpolated over the longer context, and training adapts them. Rotary
positions have no weights: model.rope_scaling and model.rope_factor scale them.
Shapes: T0 context length of the source model, T1 of the new one, C n_embd.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from model.config import ModelConfig

# Fields that determine the weights, or what they compute. A new run may change dropout, the context
# length, and the mask, window and implementation of attention.
MUST_AGREE = (
    "vocab_size",
    "vocab_multiple",
    "n_layer",
    "n_head",
    "n_embd",
    "n_kv_head",
    "head_size",
    "qk_norm",
    "norm",
    "mlp",
    "n_inner",
    "norm_eps",
    "positions",
    "tie_embeddings",
    "logit_softcap",
    "bias",
    "scale_attn_by_inverse_layer_idx",
)
# Fields of rotary positions. Each run sets its own, because another context may need other values.
ROTARY = ("rope_base", "rope_scaling", "rope_factor")
_POSITIONS = "pos_emb.weight"


def differences(source: ModelConfig, target: ModelConfig) -> list[str]:
    """List the fields that keep weights of `source` from fitting `target`, with both values."""
    fields = differing(MUST_AGREE, source, target)
    if source.context_length == target.context_length:
        # With the same context length, different rotary settings are most likely a mistake.
        fields += differing(ROTARY, source, target)
    return fields


def differing(names: Sequence[str], source: ModelConfig, target: ModelConfig) -> list[str]:
    """List those of the named fields that are not equal, with both values."""
    return [
        f"model.{name} is {getattr(source, name)!r} there and {getattr(target, name)!r} here"
        for name in names
        if getattr(source, name) != getattr(target, name)
    ]


def with_context_length(weights: dict[str, Tensor], context_length: int) -> dict[str, Tensor]:
    """Return the weights of a GPT, with learned positions, if any, for `context_length` tokens."""
    if _POSITIONS not in weights:
        return weights
    return weights | {_POSITIONS: extend_positions(weights[_POSITIONS], context_length)}


def extend_positions(table: Tensor, length: int) -> Tensor:
    """Resize a table of learned positions to another context length.

    A longer table is interpolated linearly, as Chen et al. 2023 (arXiv 2306.15595) do with rotary
    positions: row i reads the old table at i T0 / T1. So row 0 stays row 0. If T1 / T0 is a whole
    number, the rows at its multiples are old rows, bit for bit. Rows past the last old row repeat
    it. A shorter table has the first rows unchanged, which were trained for these positions.

    Args:
        table: (T0, C), any floating dtype.
        length: T1.

    Returns:
        (T1, C) in the dtype of `table`.
    """
    old_length = table.shape[0]
    if length <= old_length:
        return table[:length].clone()
    # Integer arithmetic, because a rounded quotient could miss a row that it should hit exactly.
    numerators = torch.arange(length, device=table.device) * old_length
    below = numerators // length
    above = (below + 1).clamp(max=old_length - 1)
    exact = table.to(torch.promote_types(table.dtype, torch.float32))
    fraction = (numerators % length).to(exact.dtype) / length
    return torch.lerp(exact[below], exact[above], fraction[:, None]).to(table.dtype)
