"""Limits of the kernels, for code that checks a configuration without importing PyTorch."""

MAX_HEAD_DIM = 256
BLOCK_SIZES = (16, 32, 64, 128, 256)
"""Queries and keys in a block of a `BlockSparseMask`."""
MAX_VOCAB_SIZE = 2**24
"""Upper bound on token ids. Tokenizers need less than a tenth; damaged ones ask for any number."""
CHUNK_BYTES = 2**30
"""Memory limit for the logits that exist at a time. Each chunk costs a pass over the gradient of
the head's weight: at this size, that is little compared to the chunk's matrix products."""

MIN_RING_TOKENS = 2048
"""Tokens that a process needs for ring attention. With fewer, a step of the ring is too short to
hide the transfer of keys and values, and they are gathered instead."""
MAX_RECEIVE_BUFFER = 2**30
"""Size of the largest receive buffer for exchanges between GPUs of one machine, bytes. NCCL sends
larger tensors: buffers stay allocated, and memory is what limits longer sequences."""


def chunk_rows(n_rows: int, row_bytes: int) -> int:
    """Rows of a chunk of logits, `row_bytes` each, within CHUNK_BYTES.

    Chunks are equally long, because a short last one would cost a full pass as well.
    """
    max_rows = max(1, CHUNK_BYTES // row_bytes)
    n_chunks = max(1, -(-n_rows // max_rows))
    return max(1, -(-n_rows // n_chunks))
