"""Steps of the three backward loops, for a group of 64 keys and a row tile of 64 queries.

Scores are transposed, (keys, queries). Then p^T and ds^T are where wgmma reads its left operand,
and enter dv = p^T dout and dk = ds^T q without leaving the registers. A function that issues a
product returns its accumulator before it is done: warpgroup_mma_wait(n) waits for all products but
the last n.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import tma

from ...triton.block_ranges import n_keys_of
from ...triton.primitives import dropout_head_key, dropout_keep
from ..block_list import ALL_PARTS, in_parts
from ..call import doc_starts
from ..forward.softmax import alibi_slope, capped, with_alibi
from ..gluon import exp2, log2, opaque, round_to, split_columns, tma_store, zero_of
from ..pipeline import arrive, wait_empty, wait_full
from ..scheduler import load_scalar
from .tiles import GROUP_N, M, group_view, row_tile_at, skips_row_tile, split_of, work_of_head

BEYOND = gl.constexpr(2**30)  # a key that does not exist; sequences are far shorter


@gluon.jit
def _row_stats(shared, stage, FIRST: gl.constexpr, S: gl.constexpr):
    """Load lse (FIRST = 0) or delta (FIRST = M) of a stage: (1, M), by column of layout S."""
    numbers = shared.row_stats.index(stage).slice(FIRST, M).load(gl.SliceLayout(0, S))
    return gl.expand_dims(numbers, 0)


class View(NamedTuple):
    """Keys of a group, and the queries that see all of them."""

    start_n: gl.tensor
    batch: gl.tensor
    whole_from: gl.tensor  # queries [whole_from, whole_to) see all keys of the group
    whole_to: gl.tensor
    head_key: gl.tensor  # dropout key of the current query head, set by `begin_head`
    slope: gl.tensor  # of ALiBi, for the current query head
    parts: gl.tensor  # of the current row tile in a packed list, set by `with_parts`


@gluon.jit
def _masked_scores(s, start_m, view, call, plan: gl.constexpr):
    """Set s (keys, queries) to -inf where a query does not see a key."""
    features: gl.constexpr = plan.features
    S: gl.constexpr = s.type.layout
    n = gl.expand_dims(gl.arange(0, GROUP_N, layout=gl.SliceLayout(1, S)), 1)
    m = gl.arange(0, M, layout=gl.SliceLayout(0, S))
    key = view.start_n + n
    if plan.ragged or features.lengths:
        key = gl.where(key < n_keys_of(view.batch, call, features), key, BEYOND)
    # The last key that a query sees is at the query's own position under a causal mask, and
    # `window_size - 1` keys after it under a window alone.
    # Opaque, so that `first` is not that of ALiBi, which would keep registers for this branch.
    first, column = split_columns(opaque(start_m) + (call.seq_k - call.seq_q), M, S)
    ahead = key - first
    if features.causal:
        seen = ahead <= column
    elif features.window:
        seen = ahead - (call.window_size - 1) <= column
    else:
        seen = key < BEYOND
    if features.window:
        seen = seen & (ahead + (call.window_size - 1) >= column)
    if features.documents:
        starts = doc_starts(start_m + m, view.batch, call)
        seen = seen & (key >= gl.expand_dims(starts, 0))
    if features.packed:
        seen = seen & in_parts(view.parts, gl.expand_dims(m, 0), n)
    return gl.where(seen, s, -float("inf"))


@gluon.jit
def _hides(start_m, view, plan: gl.constexpr):
    """Whether some query of a row tile does not see all keys of the group."""
    hides = start_m < view.whole_from
    if plan.features.window or plan.features.documents:
        hides = hides | (start_m + M > view.whole_to)
    if plan.features.packed:
        hides = hides | (view.parts != ALL_PARTS)
    return hides


@gluon.jit
def begin_tile(
    work, i, kv_heads, shared, call, cid: gl.constexpr, plan: gl.constexpr, O: gl.constexpr
):
    """Wait for keys and values of the i-th key tile of a program.

    Returns:
        (`View` of group cid; the number of row tiles that it skips, of `group_view`; dk; dv). Both
        gradients are zero.
    """
    D: gl.constexpr = plan.block_d
    batch = work.batch_kv // kv_heads
    start_n = work.key_tile * plan.block + cid * GROUP_N
    skipped, whole_from, whole_to = group_view(work, cid, batch, call, plan)
    wait_full(shared.kv_full, i)
    dk = gl.zeros([GROUP_N, D], gl.float32, layout=O)
    dv = gl.zeros([GROUP_N, D], gl.float32, layout=O)
    return View(start_n, batch, whole_from, whole_to, 0, 0.0, 0), skipped, dk, dv


@gluon.jit
def begin_head(work, view, h, kv_heads, call, plan: gl.constexpr):
    """(number, `work_of_head`, its `View`) of the h-th query head of the group."""
    head = work.batch_kv % kv_heads * call.group + h
    key = 0
    if plan.features.dropout:
        key = dropout_head_key(view.batch * call.n_head + head, call)
    slope = alibi_slope(head, call, plan)
    view = View(view.start_n, view.batch, view.whole_from, view.whole_to, key, slope, 0)
    return head, work_of_head(work, head, h, call, plan), view


@gluon.jit
def with_parts(view, parts):
    """Replace the parts of `view` by those of a row tile in a packed list."""
    whole = view.whole_from, view.whole_to
    return View(view.start_n, view.batch, *whole, view.head_key, view.slope, parts)


@gluon.jit
def store_ds(ds, c, shared, cid: gl.constexpr, plan: gl.constexpr):
    """Store the c-th ds of this group in shared memory, for dq."""
    # Wait until the dq group has read what this replaces. Where the groups of keys compute dq, they
    # have waited for that themselves.
    if plan.dq_group:
        wait_empty(shared.ds_empty[cid], c)
    shared.ds.index(c % plan.ds_stages).slice(cid * GROUP_N, GROUP_N).store(ds)


@gluon.jit
def share_ds(c, shared, cid: gl.constexpr, plan: gl.constexpr):
    """Publish the c-th ds of this group: make it visible to wgmma, and arrive."""
    hopper.fence_async_shared()
    arrive(shared.ds_full[cid], c)


@gluon.jit
def gradients(
    st, dv, v_t, c, start_m, view, shared, call,
    plan: gl.constexpr, S: gl.constexpr, O: gl.constexpr,
):  # fmt: skip
    """Compute ds (keys, queries) of the row tile in stage c, whose scores st are in flight.

    Returns:
        (ds in the dtype of q; p, to be kept alive until dv is done; dv + p dout, in flight).
    """
    D: gl.constexpr = plan.block_d
    DTYPE: gl.constexpr = shared.q.dtype
    P: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    stage = c % plan.stages
    dout = shared.dout.index(stage).reshape([M, D])
    # lse is read while the scores are in flight.
    lse = _row_stats(shared, stage, 0, S)
    zero = gl.zeros([GROUP_N, M], gl.float32, layout=S)
    # Wait for the scores, then issue dp = v dout^T, which runs under the softmax.
    s = hopper.warpgroup_mma_wait(0, deps=(st,))
    dpt = hopper.warpgroup_mma(v_t, dout.permute((1, 0)), zero, use_acc=False, is_async=True)
    # Read delta here, under dp. Behind dp every step would wait for it: 10% longer at 64 columns.
    delta = _row_stats(shared, stage, M, S)
    s = capped(s, call, plan)
    if plan.features.alibi:
        first, column = split_columns(start_m + (call.seq_k - call.seq_q), M, S)
        n = gl.expand_dims(gl.arange(0, GROUP_N, layout=gl.SliceLayout(1, S)), 1)
        s = with_alibi(s, view.start_n + n - first, column, view.slope, plan)
    # Row tiles that see all keys of the group skip the mask.
    if plan.masks and _hides(start_m, view, plan):
        s = _masked_scores(s, start_m, view, call, plan)
    p = exp2(s * call.scale_log2 - lse)
    kept = p
    if plan.features.dropout:
        # dv needs p with dropout, ds needs it without. The sign of p marks what is dropped, and
        # takes no further register.
        first, column = split_columns(start_m, M, S)
        n = gl.expand_dims(gl.arange(0, GROUP_N, layout=gl.SliceLayout(1, S)), 1)
        keep = dropout_keep(view.head_key, first, column, view.start_n, n, call.threshold)
        p = gl.where(keep, p, -p)
        kept = gl.where(p < 0.0, 0.0, p)
    # Issue dv behind dp, then wait for dp only: dv runs under what follows.
    pr = gl.convert_layout(round_to(kept, DTYPE), P)
    dv = hopper.warpgroup_mma(pr, dout, dv, is_async=True)
    dp = hopper.warpgroup_mma_wait(1, deps=(dpt,))
    if plan.features.dropout:
        dp = gl.where(p < 0.0, 0.0, dp * call.keep_scale)
        p = gl.abs(p)
    if plan.features.softcap:
        # Recompute tanh from p, rather than keep it in registers. Where p = 0 it becomes -1.
        t = (log2(p) + _row_stats(shared, stage, 0, S)) * (1.0 / call.scale_log2)
        t = gl.minimum(gl.maximum(t, -1.0), 1.0)
        p *= 1.0 - t * t
    ds = round_to(p * (dp - delta), DTYPE)
    return ds, pr, dv


@gluon.jit
def add_dk(dk, ds, c, shared, plan: gl.constexpr, O: gl.constexpr):
    """Issue dk + ds q. Also returns the operand ds, to be kept alive until dk is done."""
    q = shared.q.index(c % plan.stages).reshape([M, plan.block_d])
    dr = gl.convert_layout(ds, gl.DotOperandLayout(0, O, 2))
    return hopper.warpgroup_mma(dr, q, dk, is_async=True), dr


@gluon.jit
def row_tile_of(c, step, work, shared, call, plan: gl.constexpr):
    """Row tile (packed: its entry) in stage c, at a step of a range; 0 if the plan needs none."""
    if not plan.asks_for_rows:
        return 0
    elif plan.has_block_list:
        # From the producer: to read the list here would mean to wait for the L2 cache, because each
        # acquire of a dq semaphore empties the L1 cache.
        return load_scalar(shared.row_tile.index(c % plan.stages))
    else:
        return row_tile_at(step, work, call, plan)


@gluon.jit
def head_skips(skipped, c, n, key_tile, shared, cid: gl.constexpr, call, plan: gl.constexpr):
    """Number of row tiles, 0 or 1, that group cid skips at the beginning of a query head.

    The head has n row tiles, the first of them in stage c. Without a block-sparse mask the result
    is `skipped`, of `group_view`.
    """
    if not plan.has_block_list:
        return skipped
    elif plan.features.causal and cid > 0:
        wait_full(shared.full, c, pred=n > 0)
        row_tile = load_scalar(shared.row_tile.index(c % plan.stages))
        return gl.where((n > 0) & skips_row_tile(row_tile, key_tile, cid, call, plan), 1, 0)
    else:
        return 0


@gluon.jit
def tile_in_loop(tiles, slot, c, plan: gl.constexpr):
    """Tile of keys or values in shared memory, (block, D), for a step of a loop that counts c.

    Without `zero_of` the compiler would compute all descriptors of the tile before the loop, and
    spill them: at 128 columns they take 48 registers.
    """
    return tiles.index(slot + zero_of(c)).reshape([plan.block, plan.block_d])


@gluon.jit
def scores(k_t, c, there, shared, plan: gl.constexpr, S: gl.constexpr):
    """Issue k q^T (keys, queries) of the row tile in stage c, once it is full.

    If it is not `there`, do not wait; the result is not used.
    """
    wait_full(shared.full, c, pred=there)
    q = shared.q.index(c % plan.stages).reshape([M, plan.block_d]).permute((1, 0))
    zero = gl.zeros([GROUP_N, M], gl.float32, layout=S)
    return hopper.warpgroup_mma(k_t, q, zero, use_acc=False, is_async=True)


@gluon.jit
def next_scores(k_t, c, more, shared, plan: gl.constexpr, S: gl.constexpr):
    """Issue the scores of the row tile behind stage c.

    If there are no `more`, issue those of stage c again, and do not use them: the compiler needs a
    product without a branch around it.
    """
    return scores(k_t, gl.where(more, c + 1, c), True, shared, plan, S)


@gluon.jit
def skip_row_tile(c, shared, cid: gl.constexpr, plan: gl.constexpr, S: gl.constexpr):
    """Release stage c, which is full, of a row tile that does not see the group's keys."""
    # Publish zeros as ds: both groups stay in step, and dq is the same product as elsewhere.
    store_ds(gl.zeros([GROUP_N, M], shared.q.dtype, layout=S), c, shared, cid, plan)
    share_ds(c, shared, cid, plan)
    arrive(shared.empty[cid], c)


@gluon.jit
def dkdv_place(work, view, kv_heads, order, plan: gl.constexpr):
    """(coordinates of a group's keys in dk and dv; `split_of`, negative if there is no split)."""
    at = [view.batch, work.batch_kv % kv_heads, view.start_n, 0]
    return at, split_of(work, order, plan)


@gluon.jit
def store_dkdv(
    dk, dv, dk_out, dv_out, place, dk_tile, dv_tile, call, cid: gl.constexpr, plan: gl.constexpr
):
    """Store dk and dv of a group's keys at `dkdv_place`, through two tiles in shared memory."""
    at, split = place
    # Scale once per key tile, rather than in each step.
    if plan.features.dropout:
        dv *= call.keep_scale
    dk *= call.scale
    # Other programs have the other splits of this column: another kernel adds them up.
    if plan.has_block_list and split >= 0:
        _store_split(dk, 2 * split, call, cid, plan)
        _store_split(dv, 2 * split + 1, call, cid, plan)
    else:
        _store_tiles(dk, dv, dk_out, dv_out, at, dk_tile, dv_tile, plan)


@gluon.jit
def _store_split(grad, place, call, cid: gl.constexpr, plan: gl.constexpr):
    """Store partial dk or dv of group cid, fp32, in `Call.splits_ptr`."""
    layout: gl.constexpr = grad.type.layout
    key = cid * GROUP_N + gl.arange(0, GROUP_N, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, plan.block_d, layout=gl.SliceLayout(0, layout))
    first = call.splits_ptr + place.to(gl.int64) * (plan.block * plan.block_d)
    gl.store(first + gl.expand_dims(key, 1) * plan.block_d + gl.expand_dims(column, 0), grad)


@gluon.jit
def _store_tiles(dk, dv, dk_out, dv_out, at, dk_tile, dv_tile, plan: gl.constexpr):
    """Store dk and dv through two tiles in shared memory by the copy engine."""
    D: gl.constexpr = plan.block_d
    # The last store may still be reading the tiles. The fence makes what threads write visible to
    # the copy engine.
    tma.store_wait(0)
    dv_tile.reshape([GROUP_N, D]).store(round_to(dv, dv_out.dtype))
    dk_tile.reshape([GROUP_N, D]).store(round_to(dk, dk_out.dtype))
    hopper.fence_async_shared()
    tma_store(dv_out, at, dv_tile)
    tma_store(dk_out, at, dk_tile)
