"""Scaling of training with the number of GPUs, weights and context length."""
