"""Gather keys and values from all ranks, for attention that the ring does not support.

For each of its two chunks, a rank gets the keys up to the end of that chunk. The last query is then
at the last key, as in a whole sequence, so a causal mask, a window, documents and a block-sparse
mask apply as usual (Llama 3, arXiv 2407.21783, section 3.3.2). The price is memory: each rank saves
the keys and values of the whole sequence for its backward pass.

Letters in shapes: B batch, T tokens, P processes, t = T / P tokens of a process, c = t / 2 of a
chunk, H_kv key and value heads, D head_dim.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..mask.block_mask import MaskPart
from ..registration import not_differentiable, operator
from .group import ContextGroup, all_gather, chunk_tokens, group_named


def parts_by_gather(group: ContextGroup) -> tuple[MaskPart, ...]:
    """Mask part for each chunk of this rank: queries of the chunk, and keys up to its end."""
    return tuple([((n,), tuple(range(n + 1))) for n in group.chunks])


def _chunk_owners(size: int) -> list[tuple[int, int, int]]:
    """(rank, half, chunk) of each chunk of the sequence, ordered by rank."""
    chunks = [(rank, (rank, 2 * size - 1 - rank)) for rank in range(size)]
    return [(rank, half, chunk) for rank, pair in chunks for half, chunk in enumerate(pair)]


def _fake_gather_kv(k: Tensor, v: Tensor, group: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, n_local, *rest = k.shape
    early, late = ((batch, (n + 1) * (n_local // 2), *rest) for n in group_named(group).chunks)
    return k.new_empty(early), v.new_empty(early), k.new_empty(late), v.new_empty(late)


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    *_, ctx.group = inputs


def _backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    return *scatter_dkv(*grads, ctx.group).unbind(), None


@operator("gather_kv", fake=_fake_gather_kv, setup_context=_setup_context, backward=_backward)
def _gather_kv(k: Tensor, v: Tensor, group: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gather k and v up to the end of this rank's early chunk, and up to the end of its late chunk.

    Each rank passes k and v (B, t, H_kv, D). On rank r, the results are (B, (r + 1) c, H_kv, D) for
    the early chunk and (B, (2 P - r) c, H_kv, D) for the late one.
    """
    context, c = group_named(group), chunk_tokens(k.shape[1])
    # One collective instead of two.
    kv = torch.stack((k, v))
    parts = kv.new_empty((context.size, *kv.shape))
    all_gather(parts, kv, context)
    halves = parts.unflatten(3, (2, c))  # (P, 2, B, 2, c, H_kv, D)
    results = _fake_gather_kv(k, v, group)
    for i, result in enumerate(results):
        chunks = result.unflatten(1, (-1, c))
        # Chunks arrive in the order of ranks. A causal mask hides those after the queries.
        for rank, half, chunk in _chunk_owners(context.size):
            if chunk < chunks.shape[1]:
                chunks[:, chunk].copy_(halves[rank, i % 2, :, half])
    return results


def _fake_scatter_dkv(early_dk, early_dv, late_dk, late_dv, group):
    batch, n_early, *rest = early_dk.shape
    n_local = 2 * (n_early // (group_named(group).chunks[0] + 1))
    return early_dk.new_empty((2, batch, n_local, *rest))


@operator(
    "scatter_dkv",
    fake=_fake_scatter_dkv,
    backward=not_differentiable("context_attention has no second derivative"),
)
def _scatter_dkv(
    early_dk: Tensor, early_dv: Tensor, late_dk: Tensor, late_dv: Tensor, group: str
) -> Tensor:
    """Gradients dk and dv of this rank's keys, summed over all ranks: (2, B, t, H_kv, D).

    The arguments are the gradients of the results of `gather_kv`. This is an all-to-all rather than
    a reduce-scatter, so that the sum is in fp32 and in the order of the ranks.
    """
    context = group_named(group)
    early, late = context.chunks
    batch, n_early, *rest = early_dk.shape
    c = n_early // (early + 1)
    # This rank's part of the gradient of each chunk, ordered by the owner of the chunk.
    parts = late_dk.new_empty((context.size, 2, batch, 2, c, *rest))
    for i, grads in enumerate(((early_dk, late_dk), (early_dv, late_dv))):
        early_grad, late_grad = (x.unflatten(1, (-1, c)) for x in grads)
        for rank, half, chunk in _chunk_owners(context.size):
            part = parts[rank, i, :, half]
            if chunk <= early:
                torch.add(early_grad[:, chunk], late_grad[:, chunk], out=part)
            elif chunk <= late:
                part.copy_(late_grad[:, chunk])
            else:
                part.zero_()  # no query of this rank sees the chunk
    received = torch.empty_like(parts)
    dist.all_to_all_single(received.view(-1), parts.view(-1), group=context.process_group)
    dtype = torch.promote_types(parts.dtype, torch.float32)
    return received.sum(0, dtype=dtype).to(parts.dtype).flatten(2, 3)


gather_kv = torch.ops.papilio.gather_kv.default
scatter_dkv = torch.ops.papilio.scatter_dkv.default
