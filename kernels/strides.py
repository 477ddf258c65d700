"""How far apart rows may lie; apart from the kernels, because checking a call needs no Triton."""

from torch import Tensor

# The kernels add the start of a tile in int64 and offsets within it in int32, which spares
# registers. A tile has at most 128 rows: 127 * 2^24 + head_dim < 2^31.
MAX_ROW_STRIDE = 2**24  # elements


def rows_in_reach(x: Tensor) -> bool:
    """Whether a tile of x (B, T, H, D), or of a contiguous tensor of its shape, can be addressed.

    The contiguous ones are the outputs and the gradients.
    """
    _, seq_len, n_head, head_dim = x.shape
    return seq_len == 1 or max(x.stride(1), n_head * head_dim) <= MAX_ROW_STRIDE
