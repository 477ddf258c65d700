"""Bounds of the queries that see each key tile under packed documents, for backward passes."""

import triton
import triton.language as tl
from torch import Tensor

CHUNK = tl.constexpr(256)  # queries that a program reads at a time
TOGETHER = tl.constexpr(16)  # tiles, and blocks, whose bounds one program computes
BLOCK = tl.constexpr(128)  # queries in a block
_NEVER = tl.constexpr(2**31 - 1)  # greater than any position of a key


@triton.jit(do_not_specialize=["seq_q", "n_tiles", "n_blocks"])
def document_bounds_kernel(
    doc_ptr, tiles_ptr, blocks_ptr, seq_q, n_tiles, n_blocks, TILE: tl.constexpr
):  # fmt: skip
    """One program for each batch element and `TOGETHER` tiles; see `document_bounds`."""
    n_groups = tl.cdiv(tl.maximum(n_tiles, n_blocks), TOGETHER)
    batch = (tl.program_id(0) // n_groups).to(tl.int64)
    place = tl.program_id(0) % n_groups * TOGETHER + tl.arange(0, TOGETHER)
    first_key = place[None, :] * TILE
    begin = place[None, :] * BLOCK
    all_to = tl.full((CHUNK, TOGETHER), seq_q, tl.int32)
    some_to = tl.zeros((CHUNK, TOGETHER), tl.int32)
    least = tl.full((CHUNK, TOGETHER), _NEVER, tl.int32)
    # Every program reads all queries of its sequence, as documents may come in any order. It keeps
    # CHUNK partial results for each bound, and reduces them once, after the loop.
    for start in range(0, seq_q, CHUNK):
        query = start + tl.arange(0, CHUNK)[:, None]
        # Queries past the end get a start that leaves all three bounds as they are.
        doc = tl.load(doc_ptr + batch * seq_q + query, mask=query < seq_q, other=_NEVER)
        # A document that begins after the first key of a tile hides a part of the tile; one that
        # begins after its last key hides all of it.
        all_to = tl.minimum(all_to, tl.where(doc > first_key, query, _NEVER))
        some_to = tl.maximum(some_to, tl.where(doc < first_key + TILE, query + 1, 0))
        least = tl.minimum(least, tl.where(query >= begin, doc, _NEVER))
    tile = tiles_ptr + (batch * n_tiles + place) * 2
    tl.store(tile, tl.min(all_to, 0), mask=place < n_tiles)
    tl.store(tile + 1, tl.max(some_to, 0), mask=place < n_tiles)
    tl.store(blocks_ptr + batch * n_blocks + place, tl.min(least, 0), mask=place < n_blocks)


def document_bounds(doc_start: Tensor, seq_k: int, tile_size: int) -> tuple[Tensor, Tensor]:
    """Compute document bounds for tiles of keys and for blocks of queries.

    Args:
        doc_start: (B, T_q) int32, contiguous, in any order: the first key of a query's document.
        seq_k: T_k; tile_size: keys of a tile.

    Returns:
        (tiles, blocks), int32. tiles (B, tiles of keys, 2): for queries before the first number, no
        document hides a key of the tile; from the second number on, all documents begin after it.
        blocks (B, blocks of 128 queries): the smallest start of its queries and of all later ones.
    """
    batch, seq_q = doc_start.shape
    n_tiles, n_blocks = triton.cdiv(seq_k, tile_size), triton.cdiv(seq_q, BLOCK.value)
    tiles = doc_start.new_empty((batch, n_tiles, 2))
    blocks = doc_start.new_empty((batch, n_blocks))
    n_programs = batch * triton.cdiv(max(n_tiles, n_blocks), TOGETHER.value)
    document_bounds_kernel[(n_programs,)](
        doc_start, tiles, blocks, seq_q, n_tiles, n_blocks,
        TILE=tile_size, enable_fp_fusion=True,  # pyright: ignore
    )  # fmt: skip
    return tiles, blocks
