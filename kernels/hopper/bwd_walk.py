"""Which queries a tile of keys visits in the backward pass, and whose turn it is to add to dq.

A program owns 128 keys, a group 64 of them. It walks from the first queries that see its keys to
the last, two row tiles of 64 queries at a time: a block, to whose dq the key tiles that visit it
add one after the other, in the order in which they are drawn.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.hopper import bwd_plan
from kernels.hopper.schedule import locate

M = gl.constexpr(bwd_plan.QUERIES)  # queries of a row tile
N = gl.constexpr(bwd_plan.KEYS)  # keys of a program
GROUP_N = gl.constexpr(bwd_plan.KEYS // 2)  # keys of a group
BLOCK = gl.constexpr(bwd_plan.BLOCK)


class Call(NamedTuple):
    """What a call asks for."""

    seq_q: gl.tensor
    seq_k: gl.tensor
    n_head: gl.tensor
    group: gl.tensor  # query heads of a key-value head
    scale_log2: gl.tensor  # turns a product of q and k into a score in log2


@gluon.jit
def visited_blocks(key_tile, call, plan: gl.constexpr):
    """[first, end): the blocks of queries that a key tile visits; the first tile visits all."""
    first = 0
    if plan.features.causal:
        # of the first query that sees the first key
        first = gl.maximum(key_tile * N - (call.seq_k - call.seq_q), 0) // BLOCK
        first = gl.where(key_tile == 0, 0, first)
    return first, gl.cdiv(call.seq_q, BLOCK)


@gluon.jit
def group_view(key_tile, cid: gl.constexpr, call, plan: gl.constexpr):
    """What group cid sees of the walk of its program: how many row tiles it passes over at the
    beginning, 0 or 1, and the first query from which on nothing is hidden from it."""
    first, end = visited_blocks(key_tile, call, plan)
    start_n = key_tile * N + cid * GROUP_N
    skipped = 0
    whole_from = 0
    if plan.features.causal:
        diagonal = call.seq_k - call.seq_q
        if cid > 0:
            skipped = gl.where(start_n - diagonal >= first * BLOCK + M, 1, 0)
        whole_from = start_n + GROUP_N - 1 - diagonal
    if plan.ragged:
        whole_from = gl.where(start_n + GROUP_N > call.seq_k, end * BLOCK, whole_from)
    return skipped, whole_from


@gluon.jit
def turn(block, key_tile, call, plan: gl.constexpr):
    """(how many key tiles add to a block of queries before this one, how many before the last)."""
    last = gl.cdiv(call.seq_k, N) - 1
    if plan.features.causal:
        seen_to = (block + 1) * BLOCK + call.seq_k - call.seq_q  # by the last query of the block
        last = gl.minimum(gl.maximum(seen_to - 1, 0) // N, last)
        return last - key_tile, last
    else:
        return key_tile, last


@gluon.jit
def key_tile_of(ticket, order, plan: gl.constexpr):
    """(key tile, batch times key-value head) of the ticket-th tile that is drawn.

    The heads of a section are worked on together. Under a causal mask their last keys come first:
    a walk begins where its keys begin, so that programs which start together follow each other at a
    distance of a block. Else the first keys do, and programs fall into that distance.
    """
    place, head = locate(ticket, order, True)
    return place if plan.features.causal else order.n_tiles - 1 - place, head
