"""GEMM on Hopper with bias, GELU and their gradients in the same kernel."""
