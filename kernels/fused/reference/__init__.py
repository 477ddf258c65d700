"""Reference implementations of the fused operators, in PyTorch."""
