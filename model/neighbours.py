"""Attention that begins local: biases by which each head looks at one neighbour from the start.

From labels alone, queries and keys that are told absolute positions hardly learn to look nearby,
as ablations by Coser et al. 2026 (arXiv 2605.21070) suggest. With rotary positions they can begin
so: where the bias of the keys is that of the queries, turned back by an offset, the score is
highest at the key that lies there. So heads begin as a convolution, as those of d'Ascoli et al.
2021 (ConViT, arXiv 2103.10697) do, and are free to leave. No parameter is added. Shapes: H heads,
D head_dim.
"""

import math

import torch
from torch import Tensor

from model.attention import SelfAttention
from model.positions import apply_rotary

_SEQUENCE = ((0, -1), (0, 1))
_GRID = ((-1, 0), (1, 0), (0, -1), (0, 1))


def neighbours(n_head: int, layer: int, *, grid: bool) -> tuple[Tensor, Tensor]:
    """How far away, from a query, the keys are at which the heads of a layer begin to look.

    Heads take turns: before and after, or on a grid above, below, left and right; then twice as far
    each, and so on. All distances double with every second layer, so that a stack sees ever more.
    A sequence is one row.

    Returns:
        rows, columns: each (H,) int64.
    """
    directions = torch.tensor(_GRID if grid else _SEQUENCE)
    heads = torch.arange(n_head)
    distances = (1 + heads // len(directions)) * 2 ** (layer // 2)
    rows, columns = (distances[:, None] * directions[heads % len(directions)]).unbind(dim=1)
    return rows, columns


@torch.no_grad()
def begin_local(attention: SelfAttention, cos: Tensor, sin: Tensor, score: float) -> None:
    """Set the biases of queries and keys.

    Args:
        attention: whose weights are small yet, so that biases decide where it looks.
        cos, sin: (H, D/2), tables for `apply_rotary` of the heads' neighbours, at the negative of
            their distances.
        score: that of a query and its neighbour, after scaling; of other keys it is lower, on the
            whole the farther from there they lie.
    """
    n_head, head_dim = attention.n_head, attention.head_dim
    size = math.sqrt(score / (head_dim // 2 * attention.softmax_scale))
    query = torch.zeros(n_head, head_dim)
    query[:, : head_dim // 2] = size
    # apply_rotary has one angle for all heads of a token: here the heads stand as tokens
    key = apply_rotary(query[None, :, None], cos, sin)[0, :, 0]
    biases = attention.qkv_proj.bias.view(3, n_head, head_dim)
    biases[0].copy_(query)
    biases[1].copy_(key)
