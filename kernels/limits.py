"""What the kernels take at most, for who checks a configuration without PyTorch."""

MAX_HEAD_DIM = 256
BLOCK_SIZES = (16, 32, 64, 128, 256)
"""Queries and keys in a block of a `BlockSparseMask`."""
MAX_VOCAB_SIZE = 2**24
"""Token ids are below this: no tokenizer has a tenth of it, and a damaged one asks for anything."""
