"""`BlockSparseMask`: a block layout, and the lists of blocks that the kernels visit.

Block-sparse FlashAttention (arXiv 2205.14135, section 3.3) skips the blocks that a layout leaves
out. Most other blocks need no mask and are `full`. In `partial` blocks, the causal diagonal, the
edge of a window or the end of the keys may hide some elements. The names are those of FlexAttention
(arXiv 2412.05496).

The key position of query i is p = i + seq_k - seq_q: the last query is at the last key.

Letters in shapes: H_m heads of the mask (1 for a layout that all heads share), n_q_blocks and
n_k_blocks rows and columns of blocks.
"""

import hashlib
from functools import cache
from operator import index
from typing import TYPE_CHECKING, Any, Final, TypedDict

import torch
from torch import Tensor

from ..argument_types import check_tensor, check_whole_number, is_whole_number
from ..limits import BLOCK_SIZES
from .lists import MaskLists, make_lists
from .packing import PACKED_BLOCK, pack_blocks, packed_fill

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


MaskPart = tuple[tuple[int, ...], tuple[int, ...]]
"""Chunks of a sequence by number: those of the queries, and those of the keys."""


class BlockSparseMask:
    """Block-sparse attention mask: which blocks of keys each block of queries sees. Immutable.

        mask = BlockSparseMask(butterfly(128), 128)  # for 16,257 to 16,384 tokens

    Args:
        layout: (n_q_blocks, n_k_blocks) bool, the same for all heads, or
            (H, n_q_blocks, n_k_blocks). True where query block i sees key block j.
        block_size: queries and keys in a block: 16, 32, 64, 128 or 256.

    Attributes:
        layout: (H_m, n_q_blocks, n_k_blocks) bool, a copy on the device of the argument.
        block_size: as given.
        n_head: H_m, 1 for a layout that all heads share.
        is_empty: whether the layout has no True block.
        packed_fill: mean number of visible blocks in a block of 64 that has at least one.
        digest: hexadecimal sha256 of layout and block size, the same for equal masks.

    Raises:
        ValueError: the layout is not such a tensor, or the block size is not supported.
    """

    def __init__(self, layout: Tensor, block_size: int) -> None:
        check_tensor("layout", layout)
        if layout.dtype != torch.bool or layout.dim() not in (2, 3) or layout.numel() == 0:
            raise ValueError(
                "layout must be a bool tensor (n_q_blocks, n_k_blocks) or (H, n_q_blocks, "
                f"n_k_blocks), none of them 0, got {layout.dtype} of shape {tuple(layout.shape)}"
            )
        if not is_whole_number(block_size) or block_size not in BLOCK_SIZES:
            raise ValueError(f"block_size must be one of {BLOCK_SIZES}, got {block_size!r}")
        layout = layout.clone(memory_format=torch.contiguous_format)
        self.layout: Final = layout if layout.dim() == 3 else layout.unsqueeze(0)
        self.block_size: Final = block_size
        self.n_head: Final = self.layout.shape[0]
        self.is_empty: Final = not bool(layout.any())
        self.packed_fill: Final = packed_fill(self.layout, block_size)
        content = hashlib.sha256(f"{tuple(self.layout.shape)}, {block_size}".encode())
        content.update(self.layout.cpu().numpy().tobytes())
        self.digest: Final = content.hexdigest()
        self.decisions: Final[dict[tuple, Any]] = {}  # cache of kernels.attention
        self._cache: Final[dict[tuple, MaskLists]] = {}
        self._parts: Final[dict[tuple, BlockSparseMask]] = {}
        _mark_constant_results()

    def __reduce__(self) -> tuple:
        """Copy and pickle only the layout and the block size, without what is derived from them."""
        return BlockSparseMask, (self.layout, self.block_size)

    def __repr__(self) -> str:
        n_head, n_q_blocks, n_k_blocks = self.layout.shape
        heads = "all heads" if n_head == 1 else f"each of {n_head} heads"
        blocks = f"{n_q_blocks} x {n_k_blocks} blocks of {self.block_size} for {heads}"
        return f"BlockSparseMask({blocks}, density {self.layout.double().mean().item():.3f})"

    def lists(
        self, seq_q: int, seq_k: int, *, causal: bool = False, window_size: int | None = None,
        all_partial: bool = False, longest_column_first: bool = True, dq_schedule: bool = False,
        block_size: int | None = None, device: torch.device | str | None = None,
    ) -> MaskLists:  # fmt: skip
        """Lists of the blocks of the layout in which some query sees some key, cached by arguments.

        Under torch.compile the lists are constants: other lengths, options or layouts recompile.

        Args:
            seq_q: T_q, with ceil(seq_q / block_size) == n_q_blocks.
            seq_k: T_k, with ceil(seq_k / block_size) == n_k_blocks.
            causal: hide keys j > p.
            window_size: at least 1; hide keys with |p - j| >= window_size.
            all_partial: treat all blocks as partial, for masks that the lists do not include, such
                as the documents and key lengths of a batch.
            longest_column_first: sort `cols`. Otherwise, columns keep the order of the layout, and
                all heads have the same schedule, for programs that own a column of several heads.
            dq_schedule: make `col_ranges`, `visits` and `cuts`, which are None otherwise.
            block_size: block size of the lists; None: that of the mask. Larger blocks are divided
                into blocks of this size; 64 packs smaller ones.
            device: device of the lists; None: that of the layout.

        Returns:
            The lists. Callers share their tensors and must not write to them.

        Raises:
            ValueError: a length does not fit the layout, window_size is below 1, or the blocks
                cannot be listed in this block size. torch.compile wraps it in a RuntimeError.
        """
        # torch.compile calls `_lists` while tracing, and guards only on its arguments. They include
        # the digest, to distinguish masks. index() turns lengths and sizes that torch.compile
        # considers dynamic into numbers.
        window_size = None if window_size is None else index(window_size)
        sizes = index(seq_q), index(seq_k), window_size, index(block_size or self.block_size)
        return self._lists(
            self.digest, device, *sizes, causal, all_partial, longest_column_first, dq_schedule
        )

    def _lists(self, digest: str, device: torch.device | str | None, *options: Any) -> MaskLists:
        """Cached `_make_lists`; torch.compile treats the result as a constant."""
        key = self.layout.device if device is None else torch.device(device), *options
        if key not in self._cache:
            # The first caller may be in inference mode (evaluation), but autograd refuses to save
            # tensors that were made in it.
            with torch.inference_mode(False):
                self._cache[key] = self._make_lists(*key)
        return self._cache[key]

    def _make_lists(
        self, device: torch.device, seq_q: int, seq_k: int, window_size: int | None,
        block_size: int, causal: bool, *options: Any,
    ) -> MaskLists:  # fmt: skip
        if block_size not in BLOCK_SIZES or self.block_size < block_size != PACKED_BLOCK:
            raise ValueError(
                f"block_size={block_size} of lists must be one of {BLOCK_SIZES}, and at most "
                f"{self.block_size}, that of the mask, or {PACKED_BLOCK}"
            )
        self._check_lengths(seq_q, seq_k)
        if block_size < self.block_size:
            # A divided layout may reach past the sequences by whole blocks: cut those off.
            n = self.block_size // block_size
            layout = self.layout.repeat_interleave(n, 1).repeat_interleave(n, 2)
            layout = layout[:, : -(-seq_q // block_size), : -(-seq_k // block_size)]
            sizes = seq_q, seq_k, window_size, block_size
            return BlockSparseMask(layout, block_size)._make_lists(device, *sizes, causal, *options)
        full, partial, hidden = self._split(seq_q, seq_k, causal, window_size)
        hides, layout, parts = bool(hidden.any()), self.layout, None
        if block_size > self.block_size:
            full, partial, layout, parts = pack_blocks(
                full, partial, layout, self.block_size, max(seq_q, seq_k)
            )
        return make_lists(full, partial, layout, parts, block_size, hides, device, *options)

    def parts(
        self, chunk_pairs: tuple[MaskPart, ...], n_chunks: int, seq_len: int
    ) -> "tuple[BlockSparseMask, ...]":
        """Masks for some chunks of queries and some chunks of keys of a sequence, cached.

        Args:
            chunk_pairs: for each mask, the numbers of its query chunks and of its key chunks.
            n_chunks: number of chunks of equal length.
            seq_len: T, a multiple of n_chunks.

        Raises:
            ValueError: the layout does not fit T queries and keys, or chunks do not consist of
                whole blocks.
        """
        # torch.compile cannot guard on masks that a traced call returns. Instead, it calls
        # `_make_parts` for its side effect while tracing, and then reads the dictionary, once.
        self._make_parts(self.digest, chunk_pairs, index(n_chunks), index(seq_len))
        return tuple([self._parts[part, index(n_chunks), index(seq_len)] for part in chunk_pairs])

    def _make_parts(
        self, digest: str, chunk_pairs: tuple[MaskPart, ...], n_chunks: int, seq_len: int
    ) -> None:
        """Cache the masks of `parts`, under (part, n_chunks, seq_len)."""
        missing = [part for part in chunk_pairs if (part, n_chunks, seq_len) not in self._parts]
        if not missing:
            return
        self._check_lengths(seq_len, seq_len)
        size = seq_len // n_chunks
        if size % self.block_size:
            raise ValueError(
                f"{seq_len} tokens are split into {n_chunks} chunks of {size}, which the mask's "
                f"blocks of {self.block_size} do not divide: choose a length that is a "
                f"multiple of {n_chunks * self.block_size}, or smaller blocks"
            )
        n = size // self.block_size
        with torch.inference_mode(False):
            in_chunks = self.layout.unflatten(2, (n_chunks, n)).unflatten(1, (n_chunks, n))
            for rows, keys in missing:
                layout = in_chunks[:, list(rows)][:, :, :, list(keys)].flatten(3).flatten(1, 2)
                part = BlockSparseMask(layout, self.block_size)
                self._parts[(rows, keys), n_chunks, seq_len] = part

    def to_dense(self, seq_q: int, seq_k: int) -> Tensor:
        """Expand the layout to elements, without a causal mask or a window.

        Returns (H_m, seq_q, seq_k) bool, on the layout's device. The lengths must fit the layout.
        """
        self._check_lengths(seq_q, seq_k)
        expanded = self.layout.repeat_interleave(self.block_size, 1)[:, :seq_q]
        return expanded.repeat_interleave(self.block_size, 2)[:, :, :seq_k]

    def density(self, seq_q: int, seq_k: int, *, causal: bool = False) -> float:
        """Fraction, in [0, 1], of the (query, key) pairs of dense attention that the mask keeps.

        With `causal`, numerator and denominator count only pairs that a causal mask allows. The
        result is exact, counted in elements, and is the mean over heads. The lengths must fit the
        layout.
        """
        self._check_lengths(seq_q, seq_k)
        # Only visit the blocks of the layout, which are a small part of all in a long sequence.
        _, rows, columns = self.layout.nonzero(as_tuple=True)
        first, last, start, end = self._bounds(seq_q, seq_k)
        first, last, start = first[rows, 0], last[rows, 0], start[columns]
        width = end[columns].clamp(max=seq_k) - start
        pairs, dense = (last + 1 - first) * width, seq_q * seq_k
        if causal:
            # A query at p sees p + 1 - start keys of the block, clamped to [0, width].
            pairs = _ramp_sum(last + 1 - start, width) - _ramp_sum(first - start, width)
            hidden = max(0, seq_k - seq_q)
            dense = (seq_k * (seq_k + 1) - hidden * (hidden + 1)) // 2
        return pairs.sum().item() / (self.n_head * dense)

    def to_flex(
        self, seq_q: int, seq_k: int, *, causal: bool = False, window_size: int | None = None,
        device: torch.device | str | None = None,
    ) -> "BlockMask":  # fmt: skip
        """Convert to a mask of torch.nn.attention.flex_attention, with batch 1 and H_m heads.

        The lengths must fit the layout. The mask_mod also looks up the layout, because
        flex_attention without torch.compile reads nothing else.
        """
        from torch.nn.attention.flex_attention import BlockMask  # loads the compiler

        layout = self.layout.to(device=device)
        n_head, block_size, offset = self.n_head, self.block_size, seq_k - seq_q
        behind, ahead = _reach(seq_q, seq_k, causal, window_size)

        def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            head = h if n_head > 1 else 0
            distance = q + offset - kv
            near = (distance <= behind) & (distance >= -ahead)
            return near & layout[head, q // block_size, kv // block_size]

        full, partial, _ = self._split(seq_q, seq_k, causal, window_size)
        return BlockMask.from_kv_blocks(
            *_flex_blocks(partial.to(device=device)), *_flex_blocks(full.to(device=device)),
            BLOCK_SIZE=block_size, mask_mod=mask_mod, seq_lengths=(seq_q, seq_k),
        )  # fmt: skip

    @classmethod
    def from_flex(cls, block_mask: "BlockMask") -> "MaskOptions":
        """Convert a mask of torch.nn.attention.flex_attention to options of `flash_attention`.

            options = BlockSparseMask.from_flex(block_mask)  # once, not in every layer
            out = flash_attention(q, k, v, **options)  # q, k, v: (B, T, H, D)

        The options are the block-sparse mask and `causal`, `window_size`, `doc_start` and
        `kv_lengths`, as needed. Together they hide exactly the pairs that block_mask hides. Any
        other mask is refused, for example one that hides random elements within a block.

        Lists of blocks apply as in compiled flex_attention: listed full blocks are whole, and
        mask_mod is evaluated in partial blocks. A conversion synchronizes with the GPU, so convert
        a mask once. Memory is linear in the size of block_mask.

        Args:
            block_mask: for T_q queries and T_k keys, with B sequences and H heads, or 1 if they
                share a mask, and blocks of any multiple of 16 tokens. mask_mod may not depend on
                b if B is 1, nor on h if H is 1.

        Returns:
            Keyword arguments of `flash_attention`, for T_q queries and T_k keys. `mask` is left out
            if the other options hide the same pairs. doc_start (B, T_q) and kv_lengths (B,), int32,
            have the batch of block_mask: expand them if B is 1 and q has more sequences.

        Raises:
            ValueError: no options hide exactly these pairs; the message names one of them and the
                reason. Or block_mask is a slice, or its block size is not a multiple of 16.
        """
        from .from_flex import find_options

        with torch.inference_mode(False):  # autograd refuses to save tensors of inference mode
            layout, block_size, options = find_options(block_mask)
            if layout is not None:
                options["mask"] = cls(layout, block_size)
            return MaskOptions(**options)

    def _split(
        self, seq_q: int, seq_k: int, causal: bool, window_size: int | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Masks of the full blocks, the partial blocks, and the blocks that only the layout hides.

        Each is (H_m, n_q_blocks, n_k_blocks) bool.
        """
        self._check_lengths(seq_q, seq_k)
        behind, ahead = _reach(seq_q, seq_k, causal, window_size)
        first, last, start, end = self._bounds(seq_q, seq_k)
        # Each query sees an interval of keys that moves with it. Some query of a block sees a key
        # in the union of their intervals, from the start of the first to the end of the last. All
        # of them see the intersection, from the start of the last to the end of the first.
        visible = (end > first - behind) & (start <= last + ahead)
        shared = (start >= last - behind) & (end <= (first + ahead + 1).clamp(max=seq_k))
        return self.layout & shared, self.layout & visible & ~shared, visible & ~self.layout

    def _bounds(self, seq_q: int, seq_k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Key positions: first and last query of each row of blocks, start and end of each column.

        Shapes are (n_q_blocks, 1) and (n_k_blocks,). The end of a column may exceed seq_k.
        """
        _, n_q_blocks, n_k_blocks = self.layout.shape
        size, device = self.block_size, self.layout.device
        first = torch.arange(n_q_blocks, device=device).unsqueeze(1) * size + seq_k - seq_q
        last = (first + size - 1).clamp(max=seq_k - 1)
        start = torch.arange(n_k_blocks, device=device) * size
        return first, last, start, start + size

    def _check_lengths(self, seq_q: int, seq_k: int) -> None:
        _, *n_blocks = self.layout.shape
        sides = (("seq_q", seq_q, "n_q_blocks"), ("seq_k", seq_k, "n_k_blocks"))
        for (name, length, side), actual in zip(sides, n_blocks, strict=True):
            check_whole_number(name, length)
            needed = -(-length // self.block_size)
            if needed != actual:
                shortest, longest = (actual - 1) * self.block_size + 1, actual * self.block_size
                raise ValueError(
                    f"{name}={length} needs ceil({length} / {self.block_size}) = {needed} blocks, "
                    f"but the layout has {side}={actual}, for {name} from {shortest} to {longest}: "
                    f"make the mask from a layout with {side}={needed}"
                )


class MaskOptions(TypedDict, total=False):
    """Keyword arguments of `flash_attention` that hide keys; unused ones are left out."""

    mask: BlockSparseMask
    causal: bool
    window_size: int
    doc_start: Tensor
    kv_lengths: Tensor


def _reach(seq_q: int, seq_k: int, causal: bool, window_size: int | None) -> tuple[int, int]:
    """Reach (behind, ahead): a query at position p sees the keys [p - behind, p + ahead]."""
    if window_size is not None and window_size < 1:
        raise ValueError(
            f"window_size must be at least 1, the query's own key, or None, got {window_size}"
        )
    far = seq_q + seq_k if window_size is None else window_size - 1
    return far, 0 if causal else far


def _ramp_sum(n: Tensor, top: Tensor) -> Tensor:
    """Sum of min(t, top) over t = 1 ... n; 0 for n below 1."""
    n = n.clamp(min=0)
    rising = torch.minimum(n, top)
    return rising * (rising + 1) // 2 + (n - rising) * top


def _flex_blocks(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Number of True blocks in each row, and block indices with True first, for FlexAttention."""
    indices = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1).int().unsqueeze(0), indices.int().unsqueeze(0)


@cache
def _mark_constant_results() -> None:
    """Have torch.compile call these methods while tracing.

    This is not done at import, because it loads the compiler.
    """
    torch.compiler.assume_constant_result(BlockSparseMask._lists)
    torch.compiler.assume_constant_result(BlockSparseMask._make_parts)
