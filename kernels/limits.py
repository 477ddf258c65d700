"""What a call of attention may have at most, for who checks a configuration without PyTorch."""

MAX_HEAD_DIM = 256
BLOCK_SIZES = (16, 32, 64, 128, 256)
"""Queries and keys in a block of a `BlockSparseMask`."""
