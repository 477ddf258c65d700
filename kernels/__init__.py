"""Attention in Triton. Importing this needs neither a GPU nor Triton."""

import importlib
from typing import TYPE_CHECKING, Any

from .one_copy import join_loaded_copy

if TYPE_CHECKING:
    from .attention import flash_attention, flash_attention_packed
    from .block_mask import BlockSparseMask
    from .context_parallel import ContextGroup, context_attention

__all__ = [
    "BlockSparseMask",
    "ContextGroup",
    "context_attention",
    "flash_attention",
    "flash_attention_packed",
]

_MODULES = {
    "flash_attention": ".attention",
    "flash_attention_packed": ".attention",
    "BlockSparseMask": ".block_mask",
    "ContextGroup": ".context_parallel",
    "context_attention": ".context_parallel",
}


join_loaded_copy(__name__, __file__)


def __getattr__(name: str) -> Any:
    """Load PyTorch when a name is asked for: a configuration reads nothing but limits."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name], __name__), name)
