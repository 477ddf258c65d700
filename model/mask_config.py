"""Settings of the keys that attention visits. Importing it does not load PyTorch."""

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal

from kernels.limits import BLOCK_SIZES
from model.checks import check_choices, check_positive

if TYPE_CHECKING:
    from kernels.mask.block_mask import BlockSparseMask


@dataclass(frozen=True, kw_only=True)
class MaskConfig:
    """Dense attention, or a block-sparse pattern of keys.

    The butterfly is that of block-sparse FlashAttention (arXiv 2205.14135, section 3.3).
    `kernels.mask.patterns` defines the others. Every pattern also includes the window and the
    global blocks. A causal butterfly needs the window: without it, no path through the layers
    connects some pairs of blocks (block 2 attends neither to 1 nor to a block that does). A window
    of two connects them.

    Raises:
        ValueError: a field is invalid.
    """

    pattern: Literal["dense", "butterfly", "strided", "random", "window", "global"] = "dense"
    """Keys that attention visits. dense: all, or if causal all up to the query. The others are
    block-sparse, so they visit far fewer keys of long sequences. With each, block i of queries
    attends to the window and the global blocks. butterfly adds blocks whose number differs from i
    in one bit, strided adds every stride_blocks-th, and random adds random_blocks of all. window
    and global add none."""
    block_size: int = 128
    """Not dense: tokens in a block, 16, 32, 64, 128 or 256."""
    window_blocks: int = 2
    """Not dense: block i also attends to the window_blocks - 1 blocks before it; 1 adds none."""
    global_blocks: int = 1
    """Not dense: the first N blocks attend to all blocks, and all blocks to them; 0 for none."""
    stride_blocks: int = 8
    """Strided only: block i attends to i - stride_blocks, i - 2 * stride_blocks and so on."""
    random_blocks: int = 3
    """Random only: blocks drawn for each block of queries. If attention is causal, later ones stay
    hidden."""
    random_seed: int = 0
    """Random only: seed of the drawn blocks, at least 0."""

    def __post_init__(self) -> None:
        check_choices(self, "model.mask")
        if self.block_size not in BLOCK_SIZES:
            raise ValueError(
                f"model.mask.block_size={self.block_size} must be one of "
                f"{', '.join(map(str, BLOCK_SIZES))}."
            )
        check_positive(self, "model.mask", "window_blocks", "stride_blocks", most=2**63 - 1)
        for name in ("global_blocks", "random_blocks", "random_seed"):
            if not 0 <= getattr(self, name) < 2**63:
                raise ValueError(f"model.mask.{name}={getattr(self, name)} must be at least 0.")

    def build(
        self, seq_len: int, *, within: int = 0, last_query_only: bool = False
    ) -> "BlockSparseMask | None":
        """Build the mask for seq_len queries and keys; None if dense.

        Equal arguments return the same object.

        Args:
            seq_len: number of queries and of keys.
            within: context length of the model. The mask is cut from the one for this many tokens,
                because the random pattern depends on the number of blocks.
            last_query_only: mask of the last query only, for generation.
        """
        if self.pattern == "dense":
            return None
        n_blocks, n_drawn = (-(-n // self.block_size) for n in (seq_len, max(seq_len, within)))
        return _mask(self, n_blocks, n_drawn, last_query_only)

    def density(self, seq_len: int, *, causal: bool) -> float:
        """Return the fraction of dense attention's (query, key) pairs that the mask keeps."""
        mask = self.build(seq_len)
        return 1.0 if mask is None else mask.density(seq_len, seq_len, causal=causal)


@cache
def _mask(
    config: MaskConfig, n_blocks: int, n_drawn: int, last_query_only: bool
) -> "BlockSparseMask":
    # Imported here, because configurations are checked before PyTorch is loaded.
    from kernels.mask import patterns
    from kernels.mask.block_mask import BlockSparseMask

    n = n_drawn
    layout = patterns.sliding_window(n, config.window_blocks)
    layout |= patterns.global_blocks(n, min(config.global_blocks, n))
    if config.pattern == "butterfly":
        layout |= patterns.butterfly(n)
    elif config.pattern == "strided":
        layout |= patterns.strided(n, config.stride_blocks)
    elif config.pattern == "random":
        drawn = min(1 + config.random_blocks, n)
        layout |= patterns.random(n, drawn, seed=config.random_seed)
    layout = layout[:n_blocks, :n_blocks]
    return BlockSparseMask(layout[-1:] if last_query_only else layout, config.block_size)
