"""FlashAttention and FlashAttention-2, line by line as in their papers, in plain PyTorch.

These functions show what the Triton kernels do, without pointers; tests compare them with
`standard_attention`. All batches and heads are computed at once, in fp32, or in fp64 for fp64
inputs. There is no autograd: the backward is a separate function.

Letters are the papers': S scores, P probabilities before dropout, Z their dropout factors, l and m
the running sum and maximum of a row, i a tile of queries and j one of keys. In shapes: B batch, T_q
queries, T_k keys, H query heads, H_kv key and value heads, D head_dim.
"""

import math
from collections.abc import Iterator
from typing import TypedDict, Unpack

import torch
from torch import Tensor

from .standard import check_shapes, dropout_factor, finite


class AttentionOptions(TypedDict, total=False):
    """Keyword arguments, as in `standard_attention`."""

    causal: bool
    softmax_scale: float | None
    dropout_p: float
    dropout_seed: int | Tensor | None


def flash_attention_1_forward(
    q: Tensor, k: Tensor, v: Tensor, *, sram_floats: int, **options: Unpack[AttentionOptions]
) -> tuple[Tensor, Tensor]:
    """FlashAttention: Algorithm 2 of arXiv 2205.14135 (Algorithm 1 with a mask and dropout).

    K and V tiles are in the outer loop, Q tiles in the inner one. O, l and m stay in HBM and are
    read, rescaled and written for every pair of tiles.

    Args:
        q, k, v: (B, T_q, H, D) and (B, T_k, H_kv, D).
        sram_floats: M, size of the fast memory in numbers. A tile of K and V has B_c = ceil(M / 4D)
            rows, one of Q and O has B_r = min(B_c, D).
        options: as in `standard_attention`.

    Returns:
        out (B, T_q, H, D) and lse = m + log(l) (B, H, T_q).
    """
    t = _Tiles(q, k, v, options)
    B_r, B_c = _sram_tiles(sram_floats, q.shape[-1])
    O = torch.zeros_like(t.Q)
    l = torch.zeros_like(t.Q[..., :1])  # (B, H, T_q, 1)
    m = torch.full_like(l, -math.inf)
    for j in _blocks(t.T_k, B_c):
        for i in _blocks(t.T_q, B_r):
            if t.is_hidden(i, j):
                continue
            # Softmax of this tile alone.
            S = t.scores(i, j)
            m_tile = S.amax(dim=-1, keepdim=True)
            P = torch.exp(S - finite(m_tile))
            l_tile = P.sum(dim=-1, keepdim=True)
            # Merge it with the softmax of the tiles before.
            m_new = torch.maximum(m[:, :, i], m_tile)
            alpha = torch.exp(m[:, :, i] - finite(m_new))
            beta = torch.exp(m_tile - finite(m_new))
            l_new = alpha * l[:, :, i] + beta * l_tile
            PV = (P * t.Z[:, :, i, j]) @ t.V[:, :, j]
            O[:, :, i] = (l[:, :, i] * alpha * O[:, :, i] + beta * PV) / _nonzero(l_new)
            l[:, :, i], m[:, :, i] = l_new, m_new
    return O.transpose(1, 2).to(q.dtype), (m + l.log()).squeeze(-1)


def flash_attention_1_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, *, sram_floats: int,
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of FlashAttention: Algorithm 4 of arXiv 2205.14135.

    The paper saves l and m; here lse replaces both, because exp(S - m) / l = exp(S - lse). The
    paper computes delta in every tile; computed once, as here, the loops are those of
    FlashAttention-2.

    Args:
        sram_floats: M, as in `flash_attention_1_forward`; the others as in
            `flash_attention_2_backward`.

    Returns:
        dq, dk and dv in the shapes and dtypes of q, k and v.
    """
    block_m, block_n = _sram_tiles(sram_floats, q.shape[-1])
    return flash_attention_2_backward(
        q, k, v, out, lse, dout, block_m=block_m, block_n=block_n, **options
    )


def flash_attention_2_forward(
    q: Tensor, k: Tensor, v: Tensor, *, block_m: int, block_n: int,
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """FlashAttention-2: Algorithm 1 of arXiv 2307.08691.

    Q tiles are in the outer loop, K and V tiles in the inner one. An output tile is finished before
    the next begins, and divided by l only once. Of the softmax, the backward needs only lse.

    Args:
        q, k, v, options: as in `flash_attention_1_forward`.
        block_m, block_n: B_r queries and B_c keys in a tile.

    Returns:
        out (B, T_q, H, D) and lse (B, H, T_q).
    """
    t = _Tiles(q, k, v, options)
    O = torch.zeros_like(t.Q)
    lse = torch.zeros_like(t.Q[..., 0])
    for i in _blocks(t.T_q, block_m):
        O_i = torch.zeros_like(t.Q[:, :, i])
        l_i = torch.zeros_like(O_i[..., :1])
        m_i = torch.full_like(l_i, -math.inf)
        for j in _blocks(t.T_k, block_n):
            if t.is_hidden(i, j):
                break
            # Rescale the sums so far to the new maximum, and add this tile.
            S = t.scores(i, j)
            m_new = torch.maximum(m_i, S.amax(dim=-1, keepdim=True))
            P = torch.exp(S - finite(m_new))
            alpha = torch.exp(m_i - finite(m_new))
            l_i = alpha * l_i + P.sum(dim=-1, keepdim=True)
            O_i = alpha * O_i + (P * t.Z[:, :, i, j]) @ t.V[:, :, j]
            m_i = m_new
        O[:, :, i] = O_i / _nonzero(l_i)
        lse[:, :, i] = (m_i + l_i.log()).squeeze(-1)
    return O.transpose(1, 2).to(q.dtype), lse


def flash_attention_2_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, *,
    dlse: Tensor | None = None, block_m: int, block_n: int, **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of FlashAttention-2: Algorithm 2 of arXiv 2307.08691.

    Args:
        q, k, v: (B, T_q, H, D) and (B, T_k, H_kv, D).
        out, lse: (B, T_q, H, D) and (B, H, T_q), from the forward.
        dout: (B, T_q, H, D), gradient of the loss with respect to out.
        dlse: (B, H, T_q), gradient with respect to lse; None: 0. It is not in the paper.
        block_m, block_n: B_r queries and B_c keys in a tile.
        options: those of the forward.

    Returns:
        dq, dk and dv in the shapes and dtypes of q, k and v.
    """
    t = _Tiles(q, k, v, options)
    O, dO = out.transpose(1, 2).to(t.Q), dout.transpose(1, 2).to(t.Q)
    dQ, dK, dV = torch.zeros_like(t.Q), torch.zeros_like(t.K), torch.zeros_like(t.V)
    delta = (dO * O).sum(dim=-1, keepdim=True)
    if dlse is not None:
        # d lse / d S is P, so that dS = P * (dP - delta) + P * dlse.
        delta = delta - dlse.unsqueeze(-1)
    for j in _blocks(t.T_k, block_n):
        for i in _blocks(t.T_q, block_m):
            if t.is_hidden(i, j):
                continue
            dQ_ij, dK_ij, dV_ij = t.gradients(i, j, lse, dO, delta[:, :, i])
            dQ[:, :, i] += dQ_ij
            dK[:, :, j] += dK_ij
            dV[:, :, j] += dV_ij
    return dQ.transpose(1, 2).to(q.dtype), _sum_groups(dK, k), _sum_groups(dV, v)


class _Tiles:
    """Inputs with heads first, in at least fp32, and computations on a tile (queries i, keys j)."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> None:
        check_shapes(q, k, v)
        dtype = torch.promote_types(q.dtype, torch.float32)
        group = q.shape[2] // k.shape[2]
        self.Q = q.transpose(1, 2).to(dtype)  # (B, H, T_q, D)
        # (B, H, T_k, D)
        self.K, self.V = (x.repeat_interleave(group, 2).transpose(1, 2).to(dtype) for x in (k, v))
        self.T_q, self.T_k = q.shape[1], k.shape[1]
        self.causal = options.get("causal", False)
        scale = options.get("softmax_scale")
        self.softmax_scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        dropout = options.get("dropout_p", 0.0), options.get("dropout_seed")
        self.Z = dropout_factor(q, k, *dropout)  # (B, H, T_q, T_k)

    def is_hidden(self, i: slice, j: slice) -> bool:
        """Whether the whole tile is above the causal diagonal."""
        return self.causal and j.start > i.stop - 1 + self.T_k - self.T_q

    def scores(self, i: slice, j: slice) -> Tensor:
        S = self.softmax_scale * self.Q[:, :, i] @ self.K[:, :, j].mT
        if self.causal:
            diagonal = self.T_k - self.T_q + i.start - j.start
            S = S.masked_fill(torch.ones_like(S, dtype=torch.bool).triu(diagonal + 1), -math.inf)
        return S

    def gradients(
        self, i: slice, j: slice, lse: Tensor, dO: Tensor, delta: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Contribution of tile (i, j) to dQ, dK and dV; delta is that of the queries i."""
        Z, dO = self.Z[:, :, i, j], dO[:, :, i]
        P = torch.exp(self.scores(i, j) - finite(lse[:, :, i, None]))
        dP = (dO @ self.V[:, :, j].mT) * Z
        dS = self.softmax_scale * (P * (dP - delta))
        return dS @ self.K[:, :, j], dS.mT @ self.Q[:, :, i], (P * Z).mT @ dO


def _blocks(n: int, size: int) -> Iterator[slice]:
    """Slices of [0, n) of length `size`; the last one may be shorter."""
    return (slice(start, min(start + size, n)) for start in range(0, n, size))


def _sram_tiles(sram_floats: int, head_dim: int) -> tuple[int, int]:
    """B_r and B_c of arXiv 2205.14135, Algorithm 1, line 1: four tiles fill the fast memory."""
    B_c = math.ceil(sram_floats / (4 * head_dim))
    return min(B_c, head_dim), B_c


def _sum_groups(grad: Tensor, like: Tensor) -> Tensor:
    """Sum a gradient (B, H, T_k, D) over the query heads of each key head, like k or v."""
    return grad.unflatten(1, (like.shape[2], -1)).sum(dim=2).transpose(1, 2).to(like.dtype)


def _nonzero(l: Tensor) -> Tensor:
    """Replace 0 in l by 1: a row that has seen no key is divided by 1 and stays 0."""
    return l.masked_fill(l == 0, 1.0)
