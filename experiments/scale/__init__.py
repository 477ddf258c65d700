"""How training grows with GPUs, weights and context."""
