"""GPT models and what can be said about them without running them."""

from model.config import GPT2_SIZES, ModelConfig
from model.gpt import GPT

__all__ = ["GPT", "GPT2_SIZES", "ModelConfig"]
