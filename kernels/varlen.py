"""Attention of sequences of different lengths in one tensor, as flash-attn describes it.

Sequence i is rows cu_seqlens[i] to cu_seqlens[i + 1] of tensors (tokens, H, D). The kernels take
batches and document starts instead:

- Causal self-attention is one row of documents. Nothing is copied.
- Other calls, in which the keys of a sequence must also end somewhere or queries and keys have
  lengths of their own, are padded in front to a batch (N, max_seqlen, H, D). The last query and
  the last key of all sequences are then in line, as in flash-attn, and the padding comes before
  the first document.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from .argument_types import check_tensor, check_whole_number
from .tensor_cache import TensorCache


class Batch(NamedTuple):
    """Queries, keys and values as a batch, and the options that separate its sequences."""

    q: Tensor  # (B, T_q, H, D)
    k: Tensor  # (B, T_k, H_kv, D)
    v: Tensor
    doc_start: Tensor | None  # (B, T_q) int32


class Rows(NamedTuple):
    """Rows of a padded batch and tokens, by each other."""

    token: Tensor  # (N * max_seqlen,) int64: token of each row
    row: Tensor  # (tokens,) int64: row of each token


class Padding(NamedTuple):
    """Layout of a padded batch of N sequences."""

    q: Rows
    k: Rows
    doc_start: Tensor  # (N, max_seqlen_q) int32
    n_sequences: int


class Sequences:
    """Sequences in one tensor of queries and one of keys and values.

    Args:
        cu_seqlens_q, cu_seqlens_k: (N + 1,) int32, from 0, not decreasing: the number of tokens
            before each sequence, and the total.
        n_q, n_k: tokens in the tensors of queries and of keys. Results of tokens after the last
            sequence are undefined but finite.
        max_seqlen_q, max_seqlen_k: at least the length of the longest sequence.
        causal: whether the call is causal.
    """

    def __init__(
        self, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, n_q: int, n_k: int, max_seqlen_q: int,
        max_seqlen_k: int, *, causal: bool,
    ) -> None:  # fmt: skip
        self.doc_start: Tensor | None = None
        self.padding: Padding | None = None
        same = _is_same(cu_seqlens_q, cu_seqlens_k) and n_q == n_k
        n_sequences = cu_seqlens_q.shape[0] - 1
        if n_sequences == 1 and (n_q, n_k) == (max_seqlen_q, max_seqlen_k):
            pass  # one sequence that fills the tensors
        elif causal and same:
            self.doc_start = _STARTS.get(cu_seqlens_q, _document_starts, n_q)
        else:
            q = _ROWS.get(cu_seqlens_q, _padded_rows, n_q, max_seqlen_q)
            k = q
            if not same or max_seqlen_q != max_seqlen_k:
                k = _ROWS.get(cu_seqlens_k, _padded_rows, n_k, max_seqlen_k)
            starts = _padded_starts(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
            self.padding = Padding(q, k, starts, n_sequences)

    def batch(self, q: Tensor, k: Tensor, v: Tensor) -> Batch:
        """Arrange q (tokens, H, D), k and v (tokens, H_kv, D) as a batch. Differentiable."""
        if self.padding is None:
            return Batch(q[None], k[None], v[None], self.doc_start)
        q_rows, k_rows, starts, _ = self.padding
        return Batch(self.pad(q, q_rows), self.pad(k, k_rows), self.pad(v, k_rows), starts)

    def pad(self, x: Tensor, rows: Rows) -> Tensor:
        """Copy tokens (tokens, H, D) to a batch (N, max_seqlen, H, D). Differentiable."""
        assert self.padding is not None
        return _SelectRows.apply(x, *rows).unflatten(0, (self.padding.n_sequences, -1))  # pyright: ignore

    def tokens(self, out: Tensor) -> Tensor:
        """Undo `batch` for the output (B, T_q, H, D): (tokens, H, D). Differentiable."""
        if self.padding is None:
            return out[0]
        token, row = self.padding.q
        return _SelectRows.apply(out.flatten(0, 1), row, token)  # pyright: ignore

    def lse_tokens(self, lse: Tensor) -> Tensor:
        """Undo `batch` for lse (B, H, T_q): (H, tokens). Differentiable."""
        return self.tokens(lse.transpose(1, 2)).transpose(0, 1).contiguous()


def check_cu_seqlens(name: str, cu_seqlens: Tensor, max_name: str, max_seqlen: int) -> None:
    """Check the type and shape of one of the two, and its maximum.

    Raises:
        ValueError: the message names the argument.
    """
    check_tensor(name, cu_seqlens)
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2 or cu_seqlens.dtype != torch.int32:
        raise ValueError(
            f"{name} must be int32 (sequences + 1,), the number of tokens before each sequence and "
            f"the total, got {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}"
        )
    check_whole_number(max_name, max_seqlen)
    if max_seqlen < 1:
        raise ValueError(
            f"{max_name} must be the length of the longest sequence, at least 1, got {max_seqlen}"
        )


class _SelectRows(Function):
    """Rows of x by index, where `inverse` finds each row of x that matters in the result.

    The gradient is then also a selection of rows, without the atomic additions of an index_select's
    own gradient. It is exact because rows that `inverse` does not find have no gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(index, inverse)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore
        index, inverse = ctx.saved_tensors
        return _SelectRows.apply(grad, inverse, index), None, None  # pyright: ignore


_STARTS: TensorCache[Tensor] = TensorCache()
_ROWS: TensorCache[Rows] = TensorCache()


def _document_starts(cu_seqlens: Tensor, n_tokens: int) -> Tensor:
    """First token of the sequence of each token: (1, tokens) int32."""
    token = torch.arange(n_tokens, device=cu_seqlens.device, dtype=torch.int32)
    sequence = torch.searchsorted(cu_seqlens, token, right=True) - 1
    return cu_seqlens[sequence][None]


def _padded_rows(cu_seqlens: Tensor, n_tokens: int, max_seqlen: int) -> Rows:
    """Rows of a batch whose sequences are padded in front."""
    start, end = cu_seqlens[:-1, None].long(), cu_seqlens[1:, None].long()
    position = torch.arange(max_seqlen, device=cu_seqlens.device) - max_seqlen + end
    # Padding repeats the first token of its sequence, so that all values are finite.
    token_of_row = torch.maximum(position, start).clamp(max=n_tokens - 1).flatten()
    token = torch.arange(n_tokens, device=cu_seqlens.device, dtype=torch.int32)
    n_sequences = cu_seqlens.shape[0] - 1
    sequence = torch.searchsorted(cu_seqlens[1:], token, right=True).clamp(max=n_sequences - 1)
    row = token - end[sequence, 0] + (sequence + 1) * max_seqlen
    return Rows(token_of_row, row.clamp(0, n_sequences * max_seqlen - 1))


def _padded_starts(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int
) -> Tensor:
    """First visible key of each query in the padded batch: (N, max_seqlen_q) int32."""
    first_q = max_seqlen_q - cu_seqlens_q.diff()[:, None]
    first_k = max_seqlen_k - cu_seqlens_k.diff()[:, None]
    row = torch.arange(max_seqlen_q, device=cu_seqlens_q.device)
    # Queries in the padding see no key, so that they cost nothing and have no gradient.
    return torch.where(row < first_q, max_seqlen_k, first_k).int()


def _is_same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are one. Comparing values would wait for the GPU."""
    if a is b:
        return True
    if torch.compiler.is_compiling() or a.shape != b.shape:
        return False
    return a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.dtype == b.dtype
