"""Consumer of the forward pass: a group of four warps that computes out and lse of 64 queries."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ..gluon import exp2, named_barrier_arrive, named_barrier_sync, round_to, tma_store
from ..pipeline import arrive, phase_of, wait_full
from ..scheduler import first_index, pop
from . import softmax
from .tiles import M, first_tile_of, group_tiles, row_of, tile_of

FIRST_BARRIER = gl.constexpr(8)  # named barrier of group 0; the others follow


@gluon.jit
def _scores(shared, q_slot, stage, S: gl.constexpr):
    """Issue q k^T of a key tile: (M, N) in layout S, in flight."""
    D: gl.constexpr = shared.q.shape[4]
    N: gl.constexpr = shared.k.shape[3]
    q = shared.q.index(q_slot).reshape([M, D])
    k = shared.k.index(stage).reshape([N, D]).permute((1, 0))
    zero = gl.zeros([M, N], gl.float32, layout=S)
    return hopper.warpgroup_mma(q, k, zero, use_acc=False, is_async=True)


@gluon.jit
def _add_values(acc, p, shared, stage):
    """Issue acc + p v of a key tile: (M, D), in flight."""
    D: gl.constexpr = shared.v.shape[4]
    N: gl.constexpr = shared.v.shape[3]
    return hopper.warpgroup_mma(p, shared.v.index(stage).reshape([N, D]), acc, is_async=True)


@gluon.jit
def _pingpong_arrive(cid: gl.constexpr, plan: gl.constexpr):
    """Let the next group issue its products, which then run under the softmax of this one."""
    if plan.pingpong:
        named_barrier_arrive(FIRST_BARRIER + (cid + 1) % plan.groups)


@gluon.jit
def _attend(
    n, acc, p, m_i, l_i, key_tile, c, shared, q_slot, row, rows, call,
    cid: gl.constexpr, plan: gl.constexpr, S: gl.constexpr, O: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Process n key tiles before `key_tile`, last tile first, and update the online softmax.

    acc (M, D) still lacks p v of the tile before, whose probabilities are p. That product is issued
    with q k^T of this tile, so the tensor cores are busy while other units compute the softmax. m_i
    holds the row maxima in log2, l_i (M, 4) the sums of probabilities by thread; c counts stages.
    """
    for _ in range(n):
        key_tile -= 1
        start_n, parts = tile_of(key_tile, row, call, plan)
        stage = c % plan.stages
        # Wait until the stage holds k of this tile and v of the one before.
        wait_full(shared.full, c)
        # Issue both products back to back, then wait for the first only. In pingpong, wait until
        # the group before has its scores.
        if plan.pingpong:
            named_barrier_sync(FIRST_BARRIER + cid)
        s = _scores(shared, q_slot, stage, S)
        acc = _add_values(acc, p, shared, stage)
        s = hopper.warpgroup_mma_wait(1, deps=(s,))
        # Hand over when the scores are done. Right after the products are issued gains less; after
        # the values are done is a third slower.
        _pingpong_arrive(cid, plan)
        s = softmax.masked_scores(s, start_n, parts, rows, call, plan, MASKED)
        m_new = gl.maximum(m_i, softmax.row_max(s, plan) * call.scale_log2)
        # p is the register operand of the product in flight: keep it alive until that is done. Then
        # the stage has been read, and the producer may refill it.
        acc, p = hopper.warpgroup_mma_wait(0, deps=(acc, p))
        arrive(shared.empty, c)
        p, l, pivot = softmax.probabilities(s, m_new, start_n, rows, call, plan, MASKED)
        # Maxima are in log2 already, so alpha is exactly 1 where a maximum stays.
        alpha = exp2(m_i - pivot)
        l_i = softmax.times_rows(l_i, alpha) + l
        acc = softmax.times_rows(acc, alpha)
        p = softmax.as_operand(p, shared.q.dtype, O)
        m_i = m_new
        c += 1
    return acc, p, m_i, l_i, key_tile, c


@gluon.jit
def _first_scores(shared, q_slot, q_phase, c, skipped, more, plan: gl.constexpr, S: gl.constexpr):
    """Issue q k^T of the first key tile that the group sees in a row tile; stage c is full.

    Without `more` work the product is issued all the same, and its result is not used.
    """
    mbarrier.wait(shared.q_full.index(q_slot), q_phase, pred=more)
    # Pass over the skipped tiles without releasing them: stage c also holds the last values of the
    # row tile before, whose product may be in flight, and stages are released in order.
    if plan.skips:
        for _ in range(skipped):
            c += 1
            wait_full(shared.full, c)
    return _scores(shared, q_slot, c % plan.stages, S)


@gluon.jit
def _release_first(shared, c, skipped, plan: gl.constexpr):
    """Release the stages that `_first_scores` held; return c of the next tile."""
    arrive(shared.empty, c)
    c += 1
    if plan.skips:
        for _ in range(skipped):
            arrive(shared.empty, c)
            c += 1
    return c


@gluon.jit
def consume(out, lse_ptr, teams, order, call, number: gl.constexpr, plan: gl.constexpr):
    """Body of consumer group `number` of all teams: process one row tile after the other.

    The first scores of the next row tile are issued behind the last values of this one, so that the
    tensor cores work while the output is scaled and stored. With `plan.out_over_q` they have to
    wait, because the output takes the place of the queries.
    """
    team: gl.constexpr = number // plan.groups
    cid: gl.constexpr = number % plan.groups
    shared, queue = teams[team]
    D: gl.constexpr = plan.block_d
    DTYPE: gl.constexpr = shared.q.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, plan.block_n, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    # With plan.cut == 1 only the first tile may hide late keys: it is peeled off, so that no loop
    # has to mask them.
    FIRST_MASKED: gl.constexpr = plan.cut > 0 or plan.low
    total = order.n_tiles * order.n_heads
    if cid == plan.groups - 1:
        # Nobody precedes group 0, so the last group lets it begin.
        _pingpong_arrive(cid, plan)
    i = 0
    c = 0
    tile = first_index(team, plan.teams)
    start_m, batch_head, row = row_of(tile, order, call, plan)
    batch = batch_head // call.n_head
    skipped, last, high, whole, low = group_tiles(start_m, row, cid, batch, call, plan)
    # A team may have no tile at all. Then its producer fills only stage 0, with values that are not
    # used: the wait below ends, but a wait for skipped tiles would not.
    more = tile < total
    if plan.skips:
        skipped = gl.where(more, skipped, 0)
    wait_full(shared.full, 0)
    s = _first_scores(shared, cid, 0, c, skipped, more, plan, S)
    s = hopper.warpgroup_mma_wait(0, deps=(s,))
    c = _release_first(shared, c, skipped, plan)
    while tile < total:
        q_slot = (i % plan.q_stages) * plan.groups + cid
        own_m = start_m + cid * M
        head = batch_head % call.n_head
        lse_tile = lse_ptr + batch_head.to(gl.int64) * call.seq_q + own_m
        rows = softmax.make_rows(own_m, batch, batch_head, row, call, plan, S)
        # The scores of the first key tile are done, and start the softmax. Then come the tiles that
        # may hide late keys, those that hide none, and those that may hide early keys.
        start_n, parts = first_tile_of(skipped, last, row, plan)
        s = softmax.masked_scores(s, start_n, parts, rows, call, plan, FIRST_MASKED)
        m_i = softmax.row_max(s, plan) * call.scale_log2
        p, l_i, _ = softmax.probabilities(s, m_i, start_n, rows, call, plan, FIRST_MASKED)
        acc = gl.zeros([M, D], gl.float32, layout=O)
        state = (acc, softmax.as_operand(p, DTYPE, O), m_i, l_i, last, c)
        if plan.cut > 1:
            state = _attend(high, *state, shared, q_slot, row, rows, call, cid, plan, S, O, True)
        state = _attend(whole, *state, shared, q_slot, row, rows, call, cid, plan, S, O, False)
        if plan.low:
            state = _attend(low, *state, shared, q_slot, row, rows, call, cid, plan, S, O, True)
        acc, p, m_i, l_i, _, c = state

        # Issue the last values of this row tile, and look up the next one under that product. All
        # scores are done, so the producer may load other queries into the slot.
        slot_left = q_slot
        if not plan.out_over_q:
            mbarrier.arrive(shared.q_empty.index(slot_left), count=1)
        wait_full(shared.full, c)
        acc = _add_values(acc, p, shared, c % plan.stages)
        lse, factor = softmax.finish_rows(m_i, l_i, head, call, plan)
        out_at = [batch, head, own_m, 0]
        tile = pop(queue, i)
        i += 1
        more = tile < total
        start_m, batch_head, row = row_of(tile, order, call, plan)
        # Past the last row tile, batch 0 keeps the loads of `group_tiles` within their tensors.
        batch = gl.where(more, batch_head // call.n_head, 0)
        skipped, last, high, whole, low = group_tiles(start_m, row, cid, batch, call, plan)
        q_slot = (i % plan.q_stages) * plan.groups + cid
        q_phase = phase_of(i, plan.q_stages)
        if plan.skips:
            skipped = gl.where(more, skipped, 0)
        # Behind it issue the first scores of the next row tile, then wait for the values only.
        if not plan.out_over_q:
            s = _first_scores(shared, q_slot, q_phase, c, skipped, more, plan, S)

        # lse needs no product in flight, so it is stored while they run.
        m = gl.arange(0, M, layout=gl.SliceLayout(1, S))
        gl.store(lse_tile + m, lse, mask=m < call.seq_q - own_m)
        acc, p = hopper.warpgroup_mma_wait(0 if plan.out_over_q else 1, deps=(acc, p))
        acc = softmax.times_rows(acc, factor)
        # The copy engine may still be reading the output before. The fence makes what the threads
        # write visible to it.
        tma.store_wait(0)
        shared.out.index(cid).reshape([M, D]).store(round_to(acc, DTYPE))
        hopper.fence_async_shared()
        tma_store(out, out_at, shared.out.index(cid))
        if plan.out_over_q:
            # The slot still holds the output: let the producer load queries only when the copy
            # engine has read it. So here the first scores cannot run under the end of a row tile.
            tma.store_wait(0)
            mbarrier.arrive(shared.q_empty.index(slot_left), count=1)
            s = _first_scores(shared, q_slot, q_phase, c, skipped, more, plan, S)
        s = hopper.warpgroup_mma_wait(0, deps=(s,))
        c = _release_first(shared, c, skipped, plan)
    # Shared memory must outlive the last store, which reads it.
    tma.store_wait(0)
