"""Attention in Triton. Importing this needs neither a GPU nor Triton."""

from kernels.attention import flash_attention

__all__ = ["flash_attention"]
