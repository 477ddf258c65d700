"""Weights of one model as the start of another."""

from model.config import ModelConfig

# What the weights are of. Dropout, and how attention is computed, a new run may choose.
MUST_AGREE = (
    "vocab_size",
    "vocab_multiple",
    "context_length",
    "n_layer",
    "n_head",
    "n_embd",
    "positions",
    "rope_base",
    "scale_attn_by_inverse_layer_idx",
)


def differences(there: ModelConfig, here: ModelConfig) -> list[str]:
    """Why weights of a model `there` are none for one `here`, each a field with both values."""
    return [
        f"model.{name} is {getattr(there, name)!r} there and {getattr(here, name)!r} here"
        for name in MUST_AGREE
        if getattr(there, name) != getattr(here, name)
    ]
