"""flash-attn's functions on Papilio's kernels."""

from .kernels.flash_attn import flash_attn_func, flash_attn_varlen_func  # pyright: ignore

__all__ = ["flash_attn_func", "flash_attn_varlen_func"]
