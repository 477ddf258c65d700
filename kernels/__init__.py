"""FlashAttention in Triton, and the fused operators of a training step.

Importing this needs neither a GPU nor Triton.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .one_copy import join_loaded_copy

if TYPE_CHECKING:
    from .attention import flash_attention, flash_attention_packed
    from .context.interface import ContextGroup, context_attention
    from .fused.cross_entropy import linear_cross_entropy
    from .fused.gelu_mlp import gelu_mlp
    from .fused.layer_norm import add_layer_norm, add_rms_norm
    from .fused.linear import linear
    from .fused.rotary import rotary_qkv
    from .mask import patterns
    from .mask.block_mask import BlockSparseMask
    from .mask.patterns import butterfly

__all__ = [
    "BlockSparseMask",
    "ContextGroup",
    "add_layer_norm",
    "add_rms_norm",
    "butterfly",
    "context_attention",
    "flash_attention",
    "flash_attention_packed",
    "gelu_mlp",
    "linear",
    "linear_cross_entropy",
    "patterns",
    "rotary_qkv",
]

_MODULES = {
    "flash_attention": ".attention",
    "flash_attention_packed": ".attention",
    "BlockSparseMask": ".mask.block_mask",
    "ContextGroup": ".context.interface",
    "context_attention": ".context.interface",
    "butterfly": ".mask.patterns",
    "patterns": ".mask",
    "linear_cross_entropy": ".fused.cross_entropy",
    "gelu_mlp": ".fused.gelu_mlp",
    "add_layer_norm": ".fused.layer_norm",
    "add_rms_norm": ".fused.layer_norm",
    "linear": ".fused.linear",
    "rotary_qkv": ".fused.rotary",
}


join_loaded_copy(__name__, __file__)


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `kernels.limits` can be read without PyTorch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name], __name__), name)


def __dir__() -> list[str]:
    """List the public names, of which most are not imported yet."""
    return sorted(__all__)
