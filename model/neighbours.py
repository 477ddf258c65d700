"""Local attention at initialisation: each head starts by attending to one neighbour.

Queries and keys with absolute positions hardly learn from labels alone to attend to nearby tokens,
as ablations by Coser et al. 2026 (arXiv 2605.21070) suggest. With rotary positions they can start
that way. If the keys' bias is the queries' bias rotated back by an offset, the score is highest at
the key with that offset. So heads start as a convolution, as in d'Ascoli et al. 2021 (ConViT, arXiv
2103.10697), and training is free to change them. No parameter is added.
Shapes: H heads, D head_dim.
"""

import math

import torch
from torch import Tensor

from kernels.fused.reference.rotary import apply_rotary
from model.attention import SelfAttention

_SEQUENCE = ((0, -1), (0, 1))
_GRID = ((-1, 0), (1, 0), (0, -1), (0, 1))


def neighbour_offsets(n_head: int, layer: int, *, grid: bool) -> tuple[Tensor, Tensor]:
    """Return the offset from a query to the key that each head of a layer attends to at first.

    Heads alternate between the token before and the one after, or on a grid between the pixels
    above, below, left and right. Further heads use the same directions at 2, 3, ... times the
    distance. All distances double every second layer, so that deeper layers reach farther. A
    sequence is one row.

    Returns:
        rows, columns: each (H,) int64.
    """
    directions = torch.tensor(_GRID if grid else _SEQUENCE)
    heads = torch.arange(n_head)
    distances = (1 + heads // len(directions)) * 2 ** (layer // 2)
    rows, columns = (distances[:, None] * directions[heads % len(directions)]).unbind(dim=1)
    return rows, columns


@torch.no_grad()
def init_local_attention(attention: SelfAttention, cos: Tensor, sin: Tensor, score: float) -> None:
    """Set the biases of queries and keys so that each head attends to its neighbour.

    Args:
        attention: freshly initialised. Its weights are small, so the biases decide the scores.
        cos, sin: (H, D/2), tables for `apply_rotary` at the negated neighbour offset of each head.
        score: attention score of a query and its neighbour, after scaling. Other keys get lower
            scores, in general the lower the farther they are from that neighbour.
    """
    n_head, head_dim = attention.n_head, attention.head_dim
    size = math.sqrt(score / (head_dim // 2 * attention.softmax_scale))
    query = torch.zeros(n_head, head_dim)
    query[:, : head_dim // 2] = size
    # apply_rotary uses the same angle for all heads of a token, so heads are passed as tokens here
    key = apply_rotary(query[None, :, None], cos, sin)[0, :, 0]
    biases = attention.qkv_proj.bias.view(3, n_head, head_dim)
    biases[0].copy_(query)
    biases[1].copy_(key)
