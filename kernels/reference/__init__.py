"""Attention in PyTorch: references for the tests of kernels, and baselines for comparison."""
