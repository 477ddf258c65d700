"""Which keys a layer visits: all that the causal mask leaves, or a butterfly of blocks of them.

The butterfly is that of block-sparse FlashAttention (arXiv 2205.14135, section 3.3), with a window
and global blocks added by OR. Under a causal mask the butterfly alone leaves some blocks that no
path of layers connects (block 2 sees neither 1 nor a block that does); a window of two mends that.
"""

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal, get_args

from kernels.limits import BLOCK_SIZES

if TYPE_CHECKING:
    from kernels.block_mask import BlockSparseMask

Pattern = Literal["dense", "butterfly"]


@dataclass(frozen=True, kw_only=True)
class MaskConfig:
    """The block mask of every layer; all but `pattern` matters to a butterfly only.

    Raises:
        ValueError: a field that no mask can be built from.
    """

    pattern: Pattern = "dense"
    """dense: every key up to the query. butterfly: block i of queries sees the blocks of keys whose
    number differs from i in at most one bit, those of the window, and the global ones."""

    block_size: int = 128
    """Tokens in a block."""

    window_blocks: int = 2
    """Block i also sees the window_blocks - 1 blocks before it; 1 adds none."""

    global_blocks: int = 1
    """So many first blocks are seen by all."""

    def __post_init__(self) -> None:
        patterns = get_args(Pattern)
        if self.pattern not in patterns:
            raise ValueError(
                f"model.mask.pattern={self.pattern!r} must be one of {', '.join(patterns)}."
            )
        if self.block_size not in BLOCK_SIZES:
            raise ValueError(
                f"model.mask.block_size={self.block_size} must be one of "
                f"{', '.join(map(str, BLOCK_SIZES))}."
            )
        for name, least in (("window_blocks", 1), ("global_blocks", 0)):
            if getattr(self, name) < least:
                raise ValueError(
                    f"model.mask.{name}={getattr(self, name)} must be at least {least}."
                )

    def build(self, seq_len: int, *, last_query_only: bool = False) -> "BlockSparseMask | None":
        """The mask for seq_len queries and keys, the same object each time; None if dense.

        Args:
            seq_len: tokens in the sequence.
            last_query_only: for one query, at the last of seq_len keys, as generation asks for it.
        """
        if self.pattern == "dense":
            return None
        return _build(self, -(-seq_len // self.block_size), last_query_only)

    def density(self, seq_len: int, *, causal: bool) -> float:
        """The share of dense attention's (query, key) pairs that the mask keeps."""
        mask = self.build(seq_len)
        return 1.0 if mask is None else mask.density(seq_len, seq_len, causal=causal)


@cache
def _build(config: MaskConfig, n_blocks: int, last_query_only: bool) -> "BlockSparseMask":
    # here, as a configuration is checked before PyTorch is loaded
    from kernels.block_mask import BlockSparseMask
    from kernels.patterns import butterfly, sliding_window

    layout = butterfly(n_blocks, global_blocks=min(config.global_blocks, n_blocks))
    layout |= sliding_window(n_blocks, config.window_blocks)
    return BlockSparseMask(layout[-1:] if last_query_only else layout, config.block_size)
