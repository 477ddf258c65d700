"""The producer of the Hopper forward: one warp, which draws row tiles and loads what they need."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kernels.hopper.gluon import tma_load
from kernels.hopper.schedule import draw, finish, locate, post
from kernels.hopper.walk import M, row_tile_keys


@gluon.jit
def _load_v(v, shared, stage, batch, head, tile, there, N: gl.constexpr):
    tma_load(v, [batch, head, tile * N, 0], shared.full.index(stage), shared.v.index(stage), there)


@gluon.jit
def _load_q(q, shared, slot, phase, batch, head, start_m):
    mbarrier.wait(shared.q_empty.index(slot), phase)
    mbarrier.expect(shared.q_full.index(slot), q.block_type.nbytes)
    at = [batch, head, start_m, 0]
    tma_load(q, at, shared.q_full.index(slot), shared.q.index(slot))


@gluon.jit
def produce(q, k, v, shared, box, counter, order, call, plan: gl.constexpr):
    """Draw row tiles, load their queries, and walk over their keys from the last to the first."""
    N: gl.constexpr = plan.block_n
    GROUPS: gl.constexpr = plan.groups
    STAGES: gl.constexpr = plan.stages
    # Queries come behind the first keys, but for those of the first group, so that it can begin. If
    # an output takes their place, all of them do: it has to leave, and waits for these values.
    EARLY: gl.constexpr = 0 if plan.out_over_q else 1
    i = 0  # row tiles so far
    c = 0  # stages of the ring so far
    v_batch = 0  # where the values of the tile before this one are
    v_head = 0
    v_tile = 0
    tile = gl.program_id(0)
    while tile < order.n_tiles * order.n_heads:
        row_tile, batch_head = locate(tile, order, plan.features.causal)
        batch = batch_head // call.n_head
        head = batch_head % call.n_head
        kv_head = head // call.group
        start_m = row_tile * (GROUPS * M)
        first, end = row_tile_keys(start_m, batch, call, plan)
        q_slot = i % plan.q_stages * GROUPS
        q_phase = ((i // plan.q_stages) & 1) ^ 1
        for step in range(end - first):
            key_tile = end - 1 - step
            stage = c % STAGES
            if step == 0:
                for g in gl.static_range(EARLY):
                    _load_q(q, shared, q_slot + g, q_phase, batch, head, start_m + g * M)
            mbarrier.wait(shared.empty.index(stage), ((c // STAGES) & 1) ^ 1)
            mbarrier.expect(shared.full.index(stage), k.block_type.nbytes, pred=c == 0)
            mbarrier.expect(shared.full.index(stage), 2 * k.block_type.nbytes, pred=c > 0)
            at = [batch, kv_head, key_tile * N, 0]
            tma_load(k, at, shared.full.index(stage), shared.k.index(stage))
            _load_v(v, shared, stage, v_batch, v_head, v_tile, c > 0, N)
            if step == 0:
                for g in gl.static_range(EARLY, GROUPS):
                    _load_q(q, shared, q_slot + g, q_phase, batch, head, start_m + g * M)
            v_batch = batch
            v_head = kv_head
            v_tile = key_tile
            c += 1
        tile = draw(counter)
        post(box, i, tile)
        i += 1
    stage = c % STAGES
    mbarrier.wait(shared.empty.index(stage), ((c // STAGES) & 1) ^ 1)
    mbarrier.expect(shared.full.index(stage), k.block_type.nbytes)
    _load_v(v, shared, stage, v_batch, v_head, v_tile, True, N)
    finish(counter)
