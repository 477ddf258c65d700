"""Block layouts for `BlockSparseMask`: which blocks of keys each block of queries sees.

A layout is a bool tensor (n_q_blocks, n_k_blocks), here square, True where queries of block i see
keys of block j. Combine layouts with OR, and stack them, or pick them by name, for different heads:

    butterfly(64, global_blocks=1) | sliding_window(64, 3)
    torch.stack([random(64, 8, seed=head) for head in range(n_head)])
    per_head(["dense", "streaming", "streaming"], streaming=streaming(64, 1, 4))

A causal mask is not part of a layout, because it cuts through blocks: pass `causal=True` as well.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..argument_types import check_whole_number


def butterfly(
    n_blocks: int, *, n_factors: int | None = None, global_blocks: int = 0,
    device: torch.device | str = "cpu",
) -> Tensor:  # fmt: skip
    """Flat block butterfly: block i sees block j iff i == j or i XOR j is a power of two.

    It is the sum of the factors of a butterfly matrix. A row has 1 + n_factors blocks, and at most
    n_factors layers connect each block to every other. With 8 blocks and all 3 factors:

        1 1 1 . 1 . . .
        1 1 . 1 . 1 . .
        1 . 1 1 . . 1 .
        . 1 1 1 . . . 1
        1 . . . 1 1 1 .
        . 1 . . 1 1 . 1
        . . 1 . 1 . 1 1
        . . . 1 . 1 1 1

    Args:
        n_blocks: any positive number. If it is not a power of two, some rows have fewer blocks,
            because some partners do not exist.
        n_factors: i XOR j is at most 2^(n_factors - 1). Default and maximum: ceil(log2(n_blocks)),
            which connects all blocks.
        global_blocks: number of leading rows and columns that are all True.

    Returns:
        (n_blocks, n_blocks) bool, on `device`.

    Raises:
        ValueError: an argument is out of range.

    Source: Pixelated Butterfly (arXiv 2112.00029), and FlatBlockButterflySparsityConfig in
    src/models/layers/blocksparse_linear.py of HazyResearch/fly, which supports only powers of two.
    """
    i, j = _rows_and_columns(n_blocks, device)
    max_factors = (n_blocks - 1).bit_length()
    n_factors = max_factors if n_factors is None else n_factors
    _check_range("n_factors", n_factors, 0, max_factors, n_blocks)
    _check_range("global_blocks", global_blocks, 0, n_blocks, n_blocks)
    # x & (x - 1) clears the lowest set bit of x.
    difference = i ^ j
    at_most_one_bit = (difference & (difference - 1)) == 0
    return (at_most_one_bit & (difference < 2**n_factors)) | (torch.minimum(i, j) < global_blocks)


def sliding_window(
    n_blocks: int, window_blocks: int, *, device: torch.device | str = "cpu"
) -> Tensor:
    """Block i sees block j iff |i - j| < window_blocks: a band of 2 window_blocks - 1 blocks.

    The sliding window of Longformer (arXiv 2004.05150), as a layout (n_blocks, n_blocks), bool.

    Raises:
        ValueError: n_blocks or window_blocks is below 1.
    """
    i, j = _rows_and_columns(n_blocks, device)
    _check_range("window_blocks", window_blocks, 1, None, n_blocks)
    return (i - j).abs() < window_blocks


def global_blocks(n_blocks: int, count: int, *, device: torch.device | str = "cpu") -> Tensor:
    """Global blocks: the first `count` blocks see every block, and every block sees them.

    The global tokens of Longformer (arXiv 2004.05150) and BigBird (arXiv 2007.14062), as a layout
    (n_blocks, n_blocks), bool.

    Raises:
        ValueError: n_blocks is below 1, or count outside of [0, n_blocks].
    """
    i, j = _rows_and_columns(n_blocks, device)
    _check_range("count", count, 0, n_blocks, n_blocks)
    return torch.minimum(i, j) < count


def streaming(
    n_blocks: int, sink_blocks: int, local_blocks: int, *, device: torch.device | str = "cpu"
) -> Tensor:
    """Attention sinks and local blocks: block i sees the first blocks and the last ones before it.

    Block i sees block j iff j <= i, and j < sink_blocks or i - j < local_blocks. A layout
    (n_blocks, n_blocks), bool, to be used with `causal=True`. With 6 blocks, 1 sink and 2 local:

        1 . . . . .
        1 1 . . . .
        1 1 1 . . .
        1 . 1 1 . .
        1 . . 1 1 .
        1 . . . 1 1

    Raises:
        ValueError: n_blocks or local_blocks is below 1, or sink_blocks outside of [0, n_blocks].

    Source: StreamingLLM (arXiv 2309.17453), in blocks, as the streaming heads of DuoAttention
    (arXiv 2410.10819) in MIT's Block-Sparse-Attention.
    """
    i, j = _rows_and_columns(n_blocks, device)
    _check_range("sink_blocks", sink_blocks, 0, n_blocks, n_blocks)
    _check_range("local_blocks", local_blocks, 1, None, n_blocks)
    return (j <= i) & ((j < sink_blocks) | (i - j < local_blocks))


def strided(n_blocks: int, stride: int, *, device: torch.device | str = "cpu") -> Tensor:
    """Block i sees block j iff (i - j) is a multiple of `stride`, which includes the diagonal.

    A layout (n_blocks, n_blocks), bool. Together with `sliding_window(n_blocks, stride)` it is the
    strided attention of the Sparse Transformer (arXiv 1904.10509, section 4.3), in blocks.

    Raises:
        ValueError: n_blocks or stride is below 1.
    """
    i, j = _rows_and_columns(n_blocks, device)
    _check_range("stride", stride, 1, None, n_blocks)
    return (i - j) % stride == 0


def random(
    n_blocks: int, n_per_row: int, *, seed: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Random blocks: each block sees itself and n_per_row - 1 others, drawn without replacement.

    The random attention of BigBird (arXiv 2007.14062), as a layout (n_blocks, n_blocks), bool. The
    result depends only on the arguments: PyTorch's generators are neither read nor changed.

    Raises:
        ValueError: n_per_row is not in [1, n_blocks], or seed not in [0, 2^63).
    """
    _check_range("n_blocks", n_blocks, 1, None, n_blocks)
    _check_range("n_per_row", n_per_row, 1, n_blocks, n_blocks)
    check_whole_number("seed", seed)
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed must be in [0, 2**63), got {seed}")
    # Drawn on the CPU, where a seed gives the same numbers on every machine. The diagonal gets 1.0,
    # above all random numbers, so that each block always sees itself.
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(n_blocks, n_blocks, generator=generator, dtype=torch.float64, device="cpu")
    chosen = scores.fill_diagonal_(1.0).topk(n_per_row).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, chosen, True).to(device)


def per_head(names: Sequence[str], **layouts: Tensor) -> Tensor:
    """Layout of each head by name, so that dense and sparse heads share one call of attention.

        names = ["dense", "streaming", "streaming", "sparse"]
        layout = per_head(names, streaming=streaming(64, 1, 4), sparse=butterfly(64))

    Args:
        names: for each of H heads, "dense" (every block) or the name of one of the layouts.
        layouts: at least one, (n_q_blocks, n_k_blocks) bool, all of the same shape and device.

    Returns:
        (H, n_q_blocks, n_k_blocks) bool.

    Raises:
        ValueError: there is no layout, one has another shape or dtype or is named "dense", or
            names is empty or has a name without a layout.

    Source: DuoAttention (arXiv 2410.10819), in which retrieval heads are dense, others streaming.
    """
    if not layouts or "dense" in layouts:
        raise ValueError(
            f"layouts={[*layouts]} must have at least one layout, and none named 'dense', which "
            "is every block. Try per_head(names, streaming=streaming(n_blocks, 1, 4))"
        )
    first = next(iter(layouts.values()))
    for name, layout in layouts.items():
        if layout.dtype != torch.bool or layout.dim() != 2 or layout.shape != first.shape:
            raise ValueError(
                f"{name} must be a bool tensor (n_q_blocks, n_k_blocks) of the same shape as the "
                f"other layouts, got {layout.dtype} of shape {tuple(layout.shape)}"
            )
    known = {"dense": torch.ones_like(first), **layouts}
    if isinstance(names, str) or not names or not {*names} <= {*known}:
        raise ValueError(
            f"names={names!r} must be a list of {[*known]}, one for each head. "
            "Try ['dense'] * n_head"
        )
    return torch.stack([known[name] for name in names])


def _rows_and_columns(n_blocks: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Row numbers i (n_blocks, 1) and column numbers j (1, n_blocks)."""
    _check_range("n_blocks", n_blocks, 1, None, n_blocks)
    numbers = torch.arange(n_blocks, device=device)
    return numbers.unsqueeze(1), numbers.unsqueeze(0)


def _check_range(name: str, value: int, low: int, high: int | None, n_blocks: int) -> None:
    check_whole_number(name, value)
    if value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise ValueError(f"{name} must be {bounds} for n_blocks={n_blocks}, got {value}")
