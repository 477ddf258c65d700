"""Producer of the forward pass: one warp that takes row tiles and loads what they need."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..block_list import block_list_row, block_list_tile, last_key_tile, n_key_tiles, number_of
from ..gluon import tma_load
from ..pipeline import phase_of, wait_empty
from ..scheduler import finish, first_index, locate, next_index, push
from .tiles import M, row_tile_keys


@gluon.jit
def produce(q, k, v, teams, counter, order, call, team: gl.constexpr, plan: gl.constexpr):
    """Body of a producer: load the queries of its row tiles, and their keys from last to first."""
    # Every kernel has warps for MOST_TEAMS producers; those without a team end here.
    if team < plan.teams:
        shared, queue = teams[team]
        tile = first_index(team, plan.teams)
        if plan.has_block_list:
            _produce_block_list(q, k, v, shared, queue, tile, counter, order, call, plan)
        else:
            _produce(q, k, v, shared, queue, tile, counter, order, call, plan)
        finish(counter, plan.teams)


@gluon.jit
def _load_queries(
    q, shared, i, batch, head, start_m, FIRST: gl.constexpr, END: gl.constexpr, plan: gl.constexpr
):
    """Load the queries of groups FIRST to END - 1 for the i-th row tile."""
    first_slot = i % plan.q_stages * plan.groups
    phase = phase_of(i, plan.q_stages) ^ 1
    # A slot for each group: it begins when its own queries are there, and frees them for itself.
    for g in gl.static_range(FIRST, END):
        slot = first_slot + g
        full = shared.q_full.index(slot)
        mbarrier.wait(shared.q_empty.index(slot), phase)
        mbarrier.expect(full, q.block_type.nbytes)
        tma_load(q, [batch, head, start_m + g * M, 0], full, shared.q.index(slot))


@gluon.jit
def _load_stage(
    q, k, v, shared, i, c, step, start_m, batch, head, kv_head, entry, v_tile, plan: gl.constexpr
):
    """Fill stage c with the keys of a tile, given by its entry, and the values of `v_tile`, the
    tile before it, if there was one. Returns `v_tile` of the next stage."""
    # In step 0, load the queries of the first group ahead of the keys, so that it can begin, and
    # the others behind them. If the output takes the place of the queries, load all of them behind
    # the keys: the output is only stored after the values that come with these keys.
    EARLY: gl.constexpr = 0 if plan.out_over_q else 1
    if step == 0:
        _load_queries(q, shared, i, batch, head, start_m, 0, EARLY, plan)
    key_tile = number_of(entry, plan)
    stage = c % plan.stages
    # Wait until all groups have released the stage. `full` flips when the expected bytes have
    # arrived: the copy engine counts them, and the producer does not wait.
    wait_empty(shared.empty, c)
    full = shared.full.index(stage)
    # Only the very first tile has no tile before it, whose values would come with its keys.
    mbarrier.expect(full, k.block_type.nbytes, pred=c == 0)
    mbarrier.expect(full, 2 * k.block_type.nbytes, pred=c > 0)
    at = [batch, kv_head, key_tile * plan.block_n, 0]
    tma_load(k, at, full, shared.k.index(stage))
    _load_values(v, shared, c, v_tile, c > 0, plan)
    if step == 0:
        _load_queries(q, shared, i, batch, head, start_m, EARLY, plan.groups, plan)
    return batch, kv_head, key_tile


@gluon.jit
def _load_values(v, shared, c, v_tile, there, plan: gl.constexpr):
    """Load the values of `v_tile` into stage c, whose barrier expects them, if `there`."""
    batch, kv_head, key_tile = v_tile
    stage = c % plan.stages
    at = [batch, kv_head, key_tile * plan.block_n, 0]
    tma_load(v, at, shared.full.index(stage), shared.v.index(stage), there)


@gluon.jit
def _load_last_values(v, shared, c, v_tile, plan: gl.constexpr):
    """Fill stage c with the values of this producer's last tile, behind which no keys come."""
    wait_empty(shared.empty, c)
    mbarrier.expect(shared.full.index(c % plan.stages), v.block_type.nbytes)
    _load_values(v, shared, c, v_tile, True, plan)


@gluon.jit
def _produce(q, k, v, shared, queue, tile, counter, order, call, plan: gl.constexpr):
    """Load one row tile after the other, from the work index `tile` on."""
    i = 0  # row tiles so far
    c = 0  # stages of the ring so far
    # (batch, key-value head, number) of the key tile before this one, also across row tiles: the
    # first stage of the next row tile brings the last values of this one.
    v_tile = (0, 0, 0)
    while tile < order.n_tiles * order.n_heads:
        row_tile, batch_head = locate(tile, order, plan.features.causal)
        batch = batch_head // call.n_head
        head = batch_head % call.n_head
        kv_head = head // call.group
        start_m = row_tile * (plan.groups * M)
        first, end = row_tile_keys(start_m, batch, call, plan)
        # From the last key tile down: the tile that a causal mask cuts is then the first that a
        # group sees, and the loop over all others has no mask.
        for step in range(end - first):
            v_tile = _load_stage(
                q, k, v, shared, i, c, step, start_m, batch, head, kv_head, end - 1 - step, v_tile,
                plan,
            )  # fmt: skip
            c += 1
        # All loads of this row tile have been issued. The groups still compute it, and ask for the
        # next index when they issue its last values.
        tile = next_index(counter, plan.teams)
        push(queue, i, tile)
        i += 1
    _load_last_values(v, shared, c, v_tile, plan)


@gluon.jit
def _produce_block_list(q, k, v, shared, queue, tile, counter, order, call, plan: gl.constexpr):
    """`_produce` for the rows of a block list. They are short, so the producer reads ahead: the
    work index after the next, the next row, and the next block of this row."""
    i = 0
    c = 0
    v_tile = (0, 0, 0)
    total = order.n_tiles * order.n_heads
    row, batch_head = block_list_row(tile, order, call, plan)
    next_tile = next_index(counter, plan.teams)
    while tile < total:
        # Publish the next index ahead of all loads, then start to read its row, so that both are
        # there when this row ends.
        push(queue, i, next_tile)
        next_row, next_batch_head = block_list_row(next_tile, order, call, plan)
        later_tile = next_index(counter, plan.teams)
        batch = batch_head // call.n_head
        head = batch_head % call.n_head
        kv_head = head // call.group
        start_m = row.number * (plan.groups * M)
        n = n_key_tiles(row, plan)
        key_tile = last_key_tile(row, plan)
        for step in range(n):
            # Read the next entry first: its load is under way while this step waits for a stage.
            ahead = block_list_tile(n - 2 - step, row, call, plan)
            v_tile = _load_stage(
                q, k, v, shared, i, c, step, start_m, batch, head, kv_head, key_tile, v_tile,
                plan,
            )  # fmt: skip
            key_tile = ahead
            c += 1
        tile = next_tile
        row = next_row
        batch_head = next_batch_head
        next_tile = later_tile
        i += 1
    _load_last_values(v, shared, c, v_tile, plan)
