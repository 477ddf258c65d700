"""Preprocess kernel of the backward pass: lse and delta of each query.

    delta = rowsum(dout * out) - dlse

The first term is the part of the softmax gradient that all keys of a row share. The second is the
gradient of lse: d lse_i / d s_ij = p_ij. Together, ds = p * (dp - delta).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...triton.primitives import LOG2E
from .tiles import M


@gluon.jit
def attn_bwd_preprocess_kernel(
    out_ptr, dout_ptr, lse_ptr, dlse_ptr, row_stats_ptr, flags_ptr, out_batch, out_token, out_head,
    dout_batch, dout_token, dout_head, seq_q, head_dim, n_head, n_tiles, plan: gl.constexpr,
):  # fmt: skip
    """Compute M queries in program i: row tile i % n_tiles of head i // n_tiles.

    row_stats (heads, n_tiles, 2, M) fp32: lse in log2, then delta. A query that does not exist or
    sees no key gets lse = inf, so that its probabilities are 0. flags (heads, n_tiles) int32, the
    dq semaphores, are set to 0.
    """
    D: gl.constexpr = plan.block_d
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    tile = gl.program_id(0) % n_tiles
    batch_head = gl.program_id(0) // n_tiles
    batch = (batch_head // n_head).to(gl.int64)
    head = (batch_head % n_head).to(gl.int64)
    m = tile * M + gl.arange(0, M, layout=by_row)
    column = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    inside = gl.expand_dims(m < seq_q, 1) & gl.expand_dims(column < head_dim, 0)
    out = _tile(out_ptr, batch, head, tile, out_batch, out_token, out_head, inside, layout)
    dout = _tile(dout_ptr, batch, head, tile, dout_batch, dout_token, dout_head, inside, layout)
    delta = gl.sum(out.to(gl.float32) * dout.to(gl.float32), 1)
    row = batch_head.to(gl.int64) * seq_q + m
    lse = gl.load(lse_ptr + row, mask=m < seq_q, other=-float("inf"))
    if dlse_ptr is not None:
        delta -= gl.load(dlse_ptr + row, mask=m < seq_q, other=0.0)
    # exp2(s - inf) is 0, without a test in the loops that read this.
    lse = gl.where(lse == -float("inf"), float("inf"), lse * LOG2E)
    at = row_stats_ptr + gl.program_id(0).to(gl.int64) * (2 * M) + gl.arange(0, M, layout=by_row)
    gl.store(at, lse)
    gl.store(at + M, delta)
    # The backward kernel starts when this one has ended, so its semaphores start at zero.
    gl.store(flags_ptr + gl.program_id(0), 0)


@gluon.jit
def _tile(ptr, batch, head, tile, by_batch, by_token, by_head, inside, layout: gl.constexpr):
    """Load row tile `tile` of a tensor, given its strides; 0 outside."""
    first = ptr + batch * by_batch + head * by_head + (tile * M).to(gl.int64) * by_token
    m = gl.arange(0, inside.shape[0], layout=gl.SliceLayout(1, layout))
    d = gl.arange(0, inside.shape[1], layout=gl.SliceLayout(0, layout))
    offset = gl.expand_dims(m, 1) * by_token + gl.expand_dims(d, 0)
    return gl.load(first + offset, mask=inside, other=0.0)
