"""What the kernels take at most, for who looks at a configuration without PyTorch."""

MAX_HEAD_DIM = 256
BLOCK_SIZES = (16, 32, 64, 128, 256)
"""Queries and keys in a block of a `BlockSparseMask`."""
MAX_VOCAB_SIZE = 2**24
"""Token ids are below this: no tokenizer has a tenth of it, and a damaged one asks for anything."""
CHUNK_BYTES = 2**30
"""The most memory that the logits which exist at a time may take: so much that what each chunk
costs, a pass over the gradient of the head's weight, is small beside its products."""

RING_LEAST_TOKENS = 2048
"""Of a process that shares sequences: with fewer, a step of the ring is too short to hide what is
sent meanwhile, and keys are gathered."""
MAX_RECEIVE_BUFFER = 2**30
"""Bytes of the largest receive buffer for exchanges between GPUs of one machine. NCCL sends larger
tensors: buffers stay allocated, and memory is what limits longer sequences."""


def chunk_rows(n_rows: int, row_bytes: int) -> int:
    """Rows of logits that exist at a time, of so many bytes each: as many in each chunk.

    A small rest would cost a pass, too.
    """
    most = max(1, CHUNK_BYTES // row_bytes)
    n_chunks = max(1, -(-n_rows // most))
    return max(1, -(-n_rows // n_chunks))
