"""The forward pass on Hopper."""
