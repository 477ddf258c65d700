"""`BlockSparseMask`: a block layout, and the lists of blocks that the kernels walk.

Block-sparse FlashAttention (arXiv 2205.14135, section 3.3) skips blocks that a layout leaves out.
Of those that are left, most need no mask. Only `partial` ones do, in which an element may be
hidden by the causal diagonal, the edge of a window or the end of the keys; the others are `full`
(the names of FlexAttention, arXiv 2412.05496). The forward pass and dq walk the rows of blocks,
dk and dv the columns.

A query i stands at key position p = i + seq_k - seq_q: the last query at the last key.

Letters in shapes: H_m heads of the mask (1: the same for all heads), n_q_blocks and n_k_blocks rows
and columns of blocks.
"""

import hashlib
from functools import cache
from operator import index
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from ..argument_types import check_tensor, check_whole_number, is_whole_number
from ..limits import BLOCK_SIZES
from .lists import MaskLists, make_lists
from .packing import ALL_PARTS, MOST_PACKED, PACKED_BLOCK, packed_fill, parts_of

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


MaskPart = tuple[tuple[int, ...], tuple[int, ...]]
"""Numbers of chunks of a sequence: of queries, and of keys."""


class BlockSparseMask:
    """Which blocks of keys each block of queries sees. Immutable.

        mask = BlockSparseMask(butterfly(128), 128)  # for 127 * 128 + 1 to 128 * 128 tokens

    Args:
        layout: (n_q_blocks, n_k_blocks) bool, the same for all heads, or
            (H, n_q_blocks, n_k_blocks). True where block i sees block j; see patterns.py.
        block_size: queries and keys in a block: 16, 32, 64, 128 or 256.

    Attributes:
        layout: (H_m, n_q_blocks, n_k_blocks) bool, a copy on the device of the argument.
        block_size: as given.
        n_head: H_m, 1 for a layout that all heads share.
        is_empty: whether no block sees another.
        packed_fill: how many of its blocks lie in a block of 64 that has one, the mean.
        digest: hexadecimal sha256 of layout and block size, the same for equal masks.

    Raises:
        ValueError: the layout is no such tensor, or there is no such block size.
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
        self.decisions: Final[dict[tuple, Any]] = {}  # of kernels.attention, for its calls
        self._cache: Final[dict[tuple, MaskLists]] = {}
        self._parts: Final[dict[tuple, BlockSparseMask]] = {}
        _take_lists_for_constants()

    def __repr__(self) -> str:
        n_head, n_q_blocks, n_k_blocks = self.layout.shape
        heads = "all heads" if n_head == 1 else f"each of {n_head} heads"
        density = self.layout.double().mean().item()
        return (
            f"BlockSparseMask({n_q_blocks} x {n_k_blocks} blocks of {self.block_size} "
            f"for {heads}, density {density:.3f})"
        )

    def lists(
        self,
        seq_q: int,
        seq_k: int,
        *,
        causal: bool = False,
        window_size: int | None = None,
        all_partial: bool = False,
        longest_column_first: bool = True,
        in_turns: bool = False,
        block_size: int | None = None,
        device: torch.device | str | None = None,
    ) -> MaskLists:
        """The blocks of the layout in which some query sees some key; made once, then remembered.

        Under torch.compile they are constants: other lengths, options or layouts compile anew.

        Args:
            seq_q: T_q, with ceil(seq_q / block_size) == n_q_blocks.
            seq_k: T_k, with ceil(seq_k / block_size) == n_k_blocks.
            causal: hide keys j > p.
            window_size: at least 1; hide keys with |p - j| >= window_size.
            all_partial: call all blocks partial, for masks that the lists do not know, such as the
                documents and key lengths of a batch.
            longest_column_first: sort `cols`. Otherwise they stand in the order of the layout, and
                `walks` in one order, too, the same for all heads, for programs that serve one
                column of several heads.
            in_turns: make `walks` and `visits`; else they are None.
            block_size: of the lists, that of the mask when None. Larger blocks are cut into blocks
                of this size; 64 packs smaller ones.
            device: of the lists; that of the layout when None.

        Returns:
            The lists. Their tensors are shared by all callers: not to be written to.

        Raises:
            ValueError: a length does not fit the layout, window_size is below 1, or blocks cannot
                be listed in blocks of this size. torch.compile wraps it in a RuntimeError of its
                own.
        """
        # torch.compile does not look into _lists and guards on none of what it reads. It does
        # guard on what is passed: the digest keeps one mask from being served the lists of
        # another, and index() turns a length or size that it holds for dynamic into a number.
        window_size = None if window_size is None else index(window_size)
        block_size = index(block_size or self.block_size)
        lengths = index(seq_q), index(seq_k)
        options = (
            causal, window_size, all_partial, longest_column_first, in_turns, block_size, device
        )  # fmt: skip
        return self._lists(self.digest, *lengths, *options)

    def _lists(
        self,
        digest: str,
        seq_q: int,
        seq_k: int,
        causal: bool,
        window_size: int | None,
        all_partial: bool,
        longest_column_first: bool,
        in_turns: bool,
        block_size: int,
        device: torch.device | str | None,
    ) -> MaskLists:
        device = self.layout.device if device is None else torch.device(device)
        if block_size not in BLOCK_SIZES or self.block_size < block_size != PACKED_BLOCK:
            raise ValueError(
                f"block_size={block_size} of lists must be one of {BLOCK_SIZES}, and at most "
                f"{self.block_size}, that of the mask, or {PACKED_BLOCK}"
            )
        options = causal, window_size, all_partial, longest_column_first, in_turns
        key = (seq_q, seq_k, *options, block_size, device)
        if block_size < self.block_size and key not in self._cache:
            self._check_lengths(seq_q, seq_k)
            cut = self._cut(seq_q, seq_k, block_size)
            self._cache[key] = cut._lists(cut.digest, seq_q, seq_k, *options, block_size, device)
        if key not in self._cache:
            # Evaluation may ask first: autograd refuses to save the tensors of inference mode.
            with torch.inference_mode(False):
                hidden = self._seen(seq_q, seq_k, causal, window_size)[0] & ~self.layout
                self._cache[key] = make_lists(
                    *self._to_list(seq_q, seq_k, causal, window_size, block_size),
                    all_partial=all_partial,
                    longest_column_first=longest_column_first,
                    in_turns=in_turns,
                    block_size=block_size,
                    hides=bool(hidden.any()),
                    device=device,
                )
        return self._cache[key]

    def _to_list(
        self, seq_q: int, seq_k: int, causal: bool, window_size: int | None, block_size: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """The full and the partial blocks, the layout, and parts if blocks are packed."""
        full, partial = self._split(seq_q, seq_k, causal, window_size)
        if block_size == self.block_size:
            return full, partial, self.layout, None
        longest = max(seq_q, seq_k)
        if longest > MOST_PACKED * PACKED_BLOCK:
            raise ValueError(
                f"blocks of {self.block_size} are packed into blocks of {PACKED_BLOCK} up to "
                f"{MOST_PACKED * PACKED_BLOCK} tokens, got {longest}: use larger blocks"
            )
        layout = parts_of(self.layout, self.block_size) > 0
        parts = parts_of(full | partial, self.block_size)
        full = parts_of(full, self.block_size) == ALL_PARTS
        return full, (parts > 0) & ~full, layout, parts

    def _cut(self, seq_q: int, seq_k: int, block_size: int) -> "BlockSparseMask":
        """The same mask in smaller blocks."""
        n = self.block_size // block_size
        layout = self.layout.repeat_interleave(n, 1).repeat_interleave(n, 2)
        n_q_blocks, n_k_blocks = -(-seq_q // block_size), -(-seq_k // block_size)
        return BlockSparseMask(layout[:, :n_q_blocks, :n_k_blocks], block_size)

    def parts(
        self, wanted: tuple[MaskPart, ...], n_chunks: int, seq_len: int
    ) -> "tuple[BlockSparseMask, ...]":
        """Of a sequence that is cut into chunks, the queries of some of them and the keys of some;
        made once, then remembered.

        Args:
            wanted: of each part, the numbers of the chunks of its queries, and of its keys.
            n_chunks: of equal length.
            seq_len: T, a multiple of n_chunks.

        Raises:
            ValueError: the layout is not for T queries and keys, or a block reaches over the edge
                of a chunk.
        """
        # torch.compile calls this when it traces, as it cannot guard on masks that it would return,
        # and then looks up what was made, all at once, as it reads a dictionary once.
        self._make_parts(self.digest, wanted, index(n_chunks), index(seq_len))
        return tuple([self._parts[part, index(n_chunks), index(seq_len)] for part in wanted])

    def _make_parts(
        self, digest: str, wanted: tuple[MaskPart, ...], n_chunks: int, seq_len: int
    ) -> None:
        missing = [part for part in wanted if (part, n_chunks, seq_len) not in self._parts]
        if not missing:
            return
        self._check_lengths(seq_len, seq_len)
        size = seq_len // n_chunks
        if size % self.block_size:
            raise ValueError(
                f"{seq_len} tokens are cut into {n_chunks} chunks of {size}, which the mask's "
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
        """The layout stretched to elements: (H_m, seq_q, seq_k) bool, on the layout's device.

        Neither causal nor a window is in it. Lengths as in `lists`.
        """
        self._check_lengths(seq_q, seq_k)
        stretched = self.layout.repeat_interleave(self.block_size, 1)[:, :seq_q]
        return stretched.repeat_interleave(self.block_size, 2)[:, :, :seq_k]

    def density(self, seq_q: int, seq_k: int, *, causal: bool = False) -> float:
        """The share, in [0, 1], of the (query, key) pairs of dense attention that the mask keeps.

        With `causal`, both count only the pairs that a causal mask leaves. Exact, in elements, the
        mean over the heads. Lengths as in `lists`.
        """
        self._check_lengths(seq_q, seq_k)
        # of the blocks that are there: in a long sequence few are, of very many
        _, rows, columns = self.layout.nonzero(as_tuple=True)
        first, last, start, end = self._bounds(seq_q, seq_k)
        first, last, start = first[rows, 0], last[rows, 0], start[columns]
        width = end[columns].clamp(max=seq_k) - start
        if causal:
            # a query at p sees p + 1 - start keys of the block, at least 0, at most all
            pairs = _ramp_sum(last + 1 - start, width) - _ramp_sum(first - start, width)
            hidden = max(0, seq_k - seq_q)
            dense = (seq_k * (seq_k + 1) - hidden * (hidden + 1)) // 2
        else:
            pairs = (last + 1 - first) * width
            dense = seq_q * seq_k
        return pairs.sum().item() / (self.n_head * dense)

    def to_flex(
        self,
        seq_q: int,
        seq_k: int,
        *,
        causal: bool = False,
        window_size: int | None = None,
        device: torch.device | str | None = None,
    ) -> "BlockMask":
        """The mask as torch.nn.attention.flex_attention takes it, with batch 1 and H_m heads.

        Arguments and errors as in `lists`. Its mask_mod looks up the layout too, because
        flex_attention without torch.compile reads nothing else; compiled, it is called in partial
        blocks only, where the layout is known to be True.
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

        full, partial = self._split(seq_q, seq_k, causal, window_size)
        return BlockMask.from_kv_blocks(
            *_flex_blocks(partial.to(device=device)),
            *_flex_blocks(full.to(device=device)),
            BLOCK_SIZE=block_size,
            mask_mod=mask_mod,
            seq_lengths=(seq_q, seq_k),
        )

    def _split(
        self, seq_q: int, seq_k: int, causal: bool, window_size: int | None
    ) -> tuple[Tensor, Tensor]:
        """The full and the partial blocks, each (H_m, n_q_blocks, n_k_blocks) bool."""
        visible, shared = self._seen(seq_q, seq_k, causal, window_size)
        return self.layout & shared, self.layout & visible & ~shared

    def _seen(
        self, seq_q: int, seq_k: int, causal: bool, window_size: int | None
    ) -> tuple[Tensor, Tensor]:
        """Where some query of a block would see some key, and where all would see all, if the
        layout were all True: (n_q_blocks, n_k_blocks) bool each."""
        self._check_lengths(seq_q, seq_k)
        behind, ahead = _reach(seq_q, seq_k, causal, window_size)
        first, last, start, end = self._bounds(seq_q, seq_k)
        # What a query sees is an interval that moves with it: a block of queries sees all from
        # where its first begins to where its last ends, and its queries share all from where the
        # last begins to where the first ends.
        visible = (end > first - behind) & (start <= last + ahead)
        shared = (start >= last - behind) & (end <= (first + ahead + 1).clamp(max=seq_k))
        return visible, shared

    def _bounds(self, seq_q: int, seq_k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Positions of the first and last query of each row (n_q_blocks, 1), and the first key of
        each column and the one after its last (n_k_blocks,). Columns are not cut by seq_k."""
        _, n_q_blocks, n_k_blocks = self.layout.shape
        size, device = self.block_size, self.layout.device
        first = torch.arange(n_q_blocks, device=device).unsqueeze(1) * size + seq_k - seq_q
        last = (first + size - 1).clamp(max=seq_k - 1)
        start = torch.arange(n_k_blocks, device=device) * size
        return first, last, start, start + size

    def _check_lengths(self, seq_q: int, seq_k: int) -> None:
        _, *n_blocks = self.layout.shape
        sides = (("seq_q", seq_q, "n_q_blocks"), ("seq_k", seq_k, "n_k_blocks"))
        for (name, length, side), has in zip(sides, n_blocks, strict=True):
            check_whole_number(name, length)
            needs = -(-length // self.block_size)
            if needs != has:
                least, most = (has - 1) * self.block_size + 1, has * self.block_size
                raise ValueError(
                    f"{name}={length} needs ceil({length} / {self.block_size}) = {needs} blocks, "
                    f"but the layout has {side}={has}, for {name} from {least} to {most}: "
                    f"make the mask from a layout with {side}={needs}"
                )


def _reach(seq_q: int, seq_k: int, causal: bool, window_size: int | None) -> tuple[int, int]:
    """`behind` and `ahead`: a query at position p sees the keys [p - behind, p + ahead]."""
    if window_size is not None and window_size < 1:
        raise ValueError(
            f"window_size must be at least 1, the query's own key, or None, got {window_size}"
        )
    far = seq_q + seq_k if window_size is None else window_size - 1
    return far, 0 if causal else far


def _ramp_sum(n: Tensor, top: Tensor) -> Tensor:
    """The sum over t = 1 ... n of min(t, top), 0 for n below 1."""
    n = n.clamp(min=0)
    rising = torch.minimum(n, top)
    return rising * (rising + 1) // 2 + (n - rising) * top


def _flex_blocks(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """FlexAttention's number and indices of the blocks in each row, the true ones first."""
    indices = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1).int().unsqueeze(0), indices.int().unsqueeze(0)


@cache
def _take_lists_for_constants() -> None:
    """Have torch.compile look into neither of these; once there is a mask, as this loads it."""
    torch.compiler.assume_constant_result(BlockSparseMask._lists)
    torch.compiler.assume_constant_result(BlockSparseMask._make_parts)
