"""GEMM on Hopper with bias, activation and their gradients in the same kernel."""
