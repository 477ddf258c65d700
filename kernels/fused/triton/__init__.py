"""Triton kernels of the fused operators."""
