"""Attention of sequences of different lengths in one tensor, as flash-attn describes it.

Sequence i is rows cu_seqlens[i] to cu_seqlens[i + 1] of tensors (tokens, H, D). The kernels take
batches and document starts instead:

- Causal self-attention is one row of documents. Nothing is copied.
- Other calls, in which the keys of a sequence must also end somewhere or queries and keys have
  lengths of their own, are padded in front to a batch (N, max_seqlen, H, D). The last query and
  the last key of all sequences are then in line, as in flash-attn, and the padding comes before
  the first document.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from .argument_types import check_tensor, check_whole_number
from .checks import may_be_read
from .tensor_cache import TensorCache
from .transforms import is_plain_call


class Batch(NamedTuple):
    """Queries, keys and values as a batch, and the options that separate its sequences."""

    q: Tensor  # (B, T_q, H, D)
    k: Tensor  # (B, T_k, H_kv, D)
    v: Tensor
    doc_start: Tensor | None  # (B, T_q) int32
    kv_lengths: Tensor | None  # (B,) int32


class Rows(NamedTuple):
    """Rows of a padded batch and tokens, by each other."""

    token: Tensor  # (N * max_seqlen,) int64: token of each row
    row: Tensor  # (tokens,) int64: row of each token
    outside: Tensor  # (tokens,) bool: whether a token comes after the last sequence


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
        max_rows: rows that padded queries and keys may have together; None: any number.
        cached: share results between calls with the same cu_seqlens.

    Raises:
        ValueError: there is no token, or padding would take more rows.
    """

    def __init__(
        self, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, n_q: int, n_k: int, max_seqlen_q: int,
        max_seqlen_k: int, *, causal: bool, max_rows: int | None = None,
        cached: bool = True,
    ) -> None:  # fmt: skip
        for name, n in (("q", n_q), ("k", n_k)):
            if n == 0:
                raise ValueError(f"{name} is empty: pass at least one token")
        self.doc_start: Tensor | None = None
        self.kv_lengths: Tensor | None = None
        self.padding: Padding | None = None
        starts_of, rows_of = (_STARTS.get, _ROWS.get) if cached else (_apply, _apply)
        same = _is_same(cu_seqlens_q, cu_seqlens_k) and n_q == n_k
        n_sequences = cu_seqlens_q.shape[0] - 1
        if causal and same:
            self.doc_start = starts_of(cu_seqlens_q, _document_starts, n_q)
        elif n_sequences == 1 and same:
            self.kv_lengths = cu_seqlens_k[1:]  # tokens may follow the sequence
        else:
            n_rows = n_sequences * (max_seqlen_q + max_seqlen_k)
            if max_rows is not None and n_rows > max_rows:
                raise ValueError(f"{n_q + n_k} tokens would be padded to {n_rows} rows")
            q = rows_of(cu_seqlens_q, _padded_rows, n_q, max_seqlen_q)
            k = q
            if not same or max_seqlen_q != max_seqlen_k:
                k = rows_of(cu_seqlens_k, _padded_rows, n_k, max_seqlen_k)
            starts = _padded_starts(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
            self.padding = Padding(q, k, starts, n_sequences)

    def batch(self, q: Tensor, k: Tensor, v: Tensor) -> Batch:
        """Arrange q (tokens, H, D), k and v (tokens, H_kv, D) as a batch. Differentiable."""
        if self.padding is None:
            return Batch(q[None], k[None], v[None], self.doc_start, self.kv_lengths)
        q_rows, k_rows, starts, _ = self.padding
        return Batch(self.pad(q, q_rows), self.pad(k, k_rows), self.pad(v, k_rows), starts, None)

    def pad(self, x: Tensor, rows: Rows) -> Tensor:
        """Copy tokens (tokens, H, D) to a batch (N, max_seqlen, H, D). Differentiable."""
        assert self.padding is not None
        return _Pad.apply(x, *rows).unflatten(0, (self.padding.n_sequences, -1))  # pyright: ignore

    def unpad(self, x: Tensor, rows: Rows) -> Tensor:
        """Undo `pad`; tokens after the last sequence are 0. Differentiable."""
        return _Unpad.apply(x.flatten(0, 1), *rows)  # pyright: ignore

    def tokens(self, out: Tensor) -> Tensor:
        """Undo `batch` for the output (B, T_q, H, D): (tokens, H, D). Differentiable."""
        return out[0] if self.padding is None else self.unpad(out, self.padding.q)

    def lse_tokens(self, lse: Tensor) -> Tensor:
        """Undo `batch` for lse (B, H, T_q): (H, tokens). Differentiable."""
        return self.tokens(lse.transpose(1, 2)).transpose(0, 1).contiguous()


def check_cu_seqlens(side: str, cu_seqlens: Tensor, max_seqlen: int, x: Tensor) -> None:
    """Check one of the two cu_seqlens and its max_seqlen. Values are checked on a CPU only.

    Args:
        side: "q" or "k", for the names in messages.
        x: q or k, (tokens, H, D).

    Raises:
        ValueError: the message names the argument.
    """
    name, longest = f"cu_seqlens_{side}", f"max_seqlen_{side}"
    check_tensor(name, cu_seqlens)
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2 or cu_seqlens.dtype != torch.int32:
        raise ValueError(
            f"{name} must be int32 (sequences + 1,), the number of tokens before each sequence and "
            f"the total, got {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}"
        )
    if cu_seqlens.device != x.device:
        raise ValueError(f"{name} must be on {x.device}, as {side} is, got {cu_seqlens.device}")
    if isinstance(max_seqlen, Tensor):
        raise ValueError(
            f"{longest} must be an int, got a tensor: call .item() once, ahead of time"
        )
    check_whole_number(longest, max_seqlen)
    if max_seqlen < 1:
        raise ValueError(
            f"{longest} must be the length of the longest sequence, at least 1, got {max_seqlen}"
        )
    if not may_be_read(cu_seqlens):
        return
    lengths = cu_seqlens.diff()
    if cu_seqlens[0] != 0 or (lengths < 0).any() or cu_seqlens[-1] > len(x):
        raise ValueError(
            f"{name} must start at 0, never decrease, and end at {len(x)} or before, the rows of "
            f"{side}, got {cu_seqlens.tolist()}. From lengths: F.pad(lengths.cumsum(0), (1, 0))"
        )
    if lengths.max() > max_seqlen:
        raise ValueError(
            f"{longest} must be at least {lengths.max()}, the longest sequence of {name}, got "
            f"{max_seqlen}"
        )


class _Pad(Function):
    """Select the token of each row.

    The gradient also selects: the row of each token, without the atomic additions of an
    index_select's own gradient. It is exact because padding has no gradient.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, token: Tensor, row: Tensor, outside: Tensor) -> Tensor:
        return x.index_select(0, token)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore
        return _Unpad.apply(grad, *ctx.saved_tensors), None, None, None  # pyright: ignore


class _Unpad(Function):
    """Select the row of each token, and 0 for tokens after the last sequence."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, token: Tensor, row: Tensor, outside: Tensor) -> Tensor:
        outside = outside.view(-1, *[1] * (x.dim() - 1))
        return x.index_select(0, row).masked_fill(outside, 0.0)

    setup_context = _Pad.setup_context

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore
        return _Pad.apply(grad, *ctx.saved_tensors), None, None, None  # pyright: ignore


_STARTS: TensorCache[Tensor] = TensorCache()
_ROWS: TensorCache[Rows] = TensorCache()


def _apply(cu_seqlens: Tensor, compute: Callable[..., Any], *arguments: Any) -> Any:
    """Compute without a cache."""
    return compute(cu_seqlens, *arguments)


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
    row = row.clamp(0, n_sequences * max_seqlen - 1)
    return Rows(token_of_row, row, token >= cu_seqlens[-1])


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
    if a.shape != b.shape or not is_plain_call(a, b):
        return False
    return a.data_ptr() == b.data_ptr() and a.stride() == b.stride()
