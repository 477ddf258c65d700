"""Attention in PyTorch: what the kernels are tested against, and what they are compared with."""
