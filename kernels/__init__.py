"""Attention in Triton. Importing this needs neither a GPU nor Triton."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kernels.attention import flash_attention

__all__ = ["flash_attention"]


def __getattr__(name: str) -> Any:
    """Load PyTorch when the function is asked for: a configuration reads nothing but limits."""
    if name != "flash_attention":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kernels.attention import flash_attention

    return flash_attention
