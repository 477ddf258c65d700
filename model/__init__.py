"""GPT models and what can be said about them without running them."""

from model.config import GPT2_SIZES, ModelConfig
from model.gpt import GPT
from model.mask import MaskConfig

__all__ = ["GPT", "GPT2_SIZES", "MaskConfig", "ModelConfig"]
