"""Online softmax of a consumer group: from scores to probabilities and running sums.

Scores are (M, N) in registers, in the layout of wgmma: two rows per thread, four threads per row.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...triton.primitives import LN2, LOG2E, dropout_head_key, dropout_keep, tanh_ratio
from ..block_list import in_parts
from ..call import doc_starts
from ..gluon import exp2, reciprocal, round_to, split_columns
from .tiles import M, row_bounds


class Rows(NamedTuple):
    """The queries of a consumer group in one row tile."""

    start_m: gl.tensor  # the first
    lower: gl.tensor  # (M,): of the visited tiles, each query sees the keys [lower, upper)
    upper: gl.tensor
    head_key: gl.tensor  # for dropout
    slope: gl.tensor  # of ALiBi


@gluon.jit
def make_rows(start_m, batch, batch_head, row, call, plan: gl.constexpr, S: gl.constexpr):
    """`Rows` of the M queries from start_m on; S is the layout of their scores."""
    query = start_m + gl.arange(0, M, layout=gl.SliceLayout(1, S))
    lower, upper = row_bounds(query, batch, call, plan)
    if plan.features.documents:
        lower = gl.maximum(lower, doc_starts(query, batch, call))
    # An empty row visits one tile all the same: hide the whole of it.
    if plan.features.empty_rows:
        upper = gl.where(row.n_full + row.n_partial > 0, upper, 0)
    head_key = 0
    if plan.features.dropout:
        head_key = dropout_head_key(batch_head, call)
    slope = alibi_slope(batch_head % call.n_head, call, plan)
    return Rows(start_m, lower, upper, head_key, slope)


@gluon.jit
def capped(s, call, plan: gl.constexpr):
    """Apply the softcap, if any, to products of q and k; times scale_log2 they are scores."""
    if plan.features.softcap:
        numerator, denominator = tanh_ratio(s * call.softcap_scale)
        s = numerator * reciprocal(denominator)
    return s


@gluon.jit
def alibi_slope(head, call, plan: gl.constexpr):
    """ALiBi's slope of a query head; 0 without ALiBi."""
    if plan.features.alibi:
        return gl.load(call.slopes_ptr + head)
    else:
        return 0.0


@gluon.jit
def with_alibi(s, offset, column, slope, plan: gl.constexpr):
    """Subtract slope * distance from products of q and k, with ALiBi.

    `split_columns` gave (first, column) of the positions along the columns of s. `offset` is the
    position of a row minus `first`, so that the distance is |offset - column|.
    Positions are exact in fp32 up to 2^24 tokens.
    """
    if plan.features.alibi:
        s = s - slope * gl.abs(offset.to(gl.float32) - column.to(gl.float32))
    return s


@gluon.jit
def masked_scores(s, start_n, parts, rows, call, plan: gl.constexpr, MASKED: gl.constexpr):
    """Apply softcap and ALiBi to products of q and k, and set those of hidden keys to -inf."""
    S: gl.constexpr = s.type.layout
    N: gl.constexpr = s.shape[1]
    s = capped(s, call, plan)
    first, column = split_columns(start_n, N, S)
    if plan.features.alibi:
        m = gl.expand_dims(gl.arange(0, M, layout=gl.SliceLayout(1, S)), 1)
        position = rows.start_m + (call.seq_k - call.seq_q) + m
        s = with_alibi(s, position - first, column, rows.slope, plan)
    if MASKED:
        seen = column < gl.expand_dims(rows.upper, 1) - first
        if plan.features.packed:
            m = gl.arange(0, M, layout=gl.SliceLayout(1, S))
            n = gl.arange(0, N, layout=gl.SliceLayout(0, S))
            seen = seen & in_parts(parts, gl.expand_dims(m, 1), gl.expand_dims(n, 0))
        if plan.low:
            seen = seen & (column >= gl.expand_dims(rows.lower, 1) - first)
        s = gl.where(seen, s, -float("inf"))
    return s


@gluon.jit
def row_max(s, plan: gl.constexpr):
    """Maximum of each row (M,), by one chain of instructions or by two independent ones, over even
    and odd columns."""
    S: gl.constexpr = s.type.layout
    # With 128 keys one chain is 31 dependent steps of 4 cycles. Four gain nothing over two.
    if plan.two_chains:
        chains = gl.max(s.reshape([M, s.shape[1] // 8, 4, 2]), 1)
        m = gl.max(gl.max(chains, 2), 1)
        return gl.convert_layout(m, gl.SliceLayout(1, S), assert_trivial=True)
    else:
        return gl.max(s, 1)


@gluon.jit
def probabilities(s, m_i, start_n, rows, call, plan: gl.constexpr, MASKED: gl.constexpr):
    """Numerators of the softmax for row maxima m_i in log2, where -inf counts as 0.

    Returns:
        (p, l, pivot): p (M, N) is the operand of the product with the values; l (M, 4) sums what
        each thread holds of a row, before dropout; pivot (M,) is the maximum that was subtracted.
    """
    pivot = m_i
    # A row that has seen no key has maximum -inf, and -inf - -inf would be NaN.
    if MASKED:
        pivot = gl.where(m_i == -float("inf"), 0.0, pivot)
    p = exp2(s * call.scale_log2 - gl.expand_dims(pivot, 1))
    # Sum by thread only: the four threads of a row add up once, in `finish_rows`. Dropout comes
    # later, because the softmax is normalized without it.
    l = gl.sum(gl.sum(p.reshape([M, p.shape[1] // 8, 4, 2]), 3), 1)
    if plan.features.dropout:
        S: gl.constexpr = s.type.layout
        m = gl.expand_dims(gl.arange(0, M, layout=gl.SliceLayout(1, S)), 1)
        first, column = split_columns(start_n, s.shape[1], S)
        keep = dropout_keep(rows.head_key, rows.start_m, m, first, column, call.threshold)
        p = gl.where(keep, p, 0.0)
    return p, l, pivot


@gluon.jit
def as_operand(p, dtype: gl.constexpr, O: gl.constexpr):
    """Round p (M, N) to the dtype of the values, in the registers where wgmma reads it."""
    return gl.convert_layout(round_to(p, dtype), gl.DotOperandLayout(0, O, 2))


@gluon.jit
def times_rows(x, factor):
    """Multiply each row of x by its factor, which is already in the threads of that row."""
    rows: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    return x * gl.expand_dims(gl.convert_layout(factor, rows, assert_trivial=True), 1)


@gluon.jit
def finish_rows(m_i, l_i, head, call, plan: gl.constexpr):
    """(lse, factor of the output) of rows with maxima m_i (M,) and sums l_i (M, 4)."""
    l = gl.convert_layout(gl.sum(l_i, 1), m_i.type.layout)
    m = m_i
    factor = 1.0
    if plan.features.sinks:
        # A sink is one more score, and may be the new maximum of the row.
        sink = gl.load(call.sinks_ptr + head) * LOG2E
        m_new = gl.maximum(m, sink)
        pivot = gl.where(m_new == -float("inf"), 0.0, m_new)
        factor = exp2(m - pivot)
        l = l * factor + exp2(sink - pivot)
        m = m_new
    lse = (m + gl.log2(l)) * LN2
    if plan.features.dropout:
        factor = factor * call.keep_scale
    # A row that sees no key has l = 0: divide its output, 0, by 1.
    return lse, factor / gl.where(l == 0.0, 1.0, l)
