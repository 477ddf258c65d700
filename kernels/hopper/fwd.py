"""The forward pass for Hopper (H100, H200), in Gluon: docs/hopper.md tells how it works.

One program runs on each multiprocessor and takes row tiles until there are none. Its producer warp
loads tiles with the copy engine; two to four consumer groups of four warps own 64 queries each.
They meet at barriers in shared memory: the producer fills a stage of a ring that all groups have
emptied.

Letters: B batch, T tokens, H heads, D head_dim; M queries of a group, N keys of a tile.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.hopper.gluon import exp2, round_to, tma_load, tma_store
from kernels.hopper.launch import compile_for, n_multiprocessors, readable, tile_counters, tiled
from kernels.hopper.schedule import Order, draw, finish, locate, make_mailbox, post, receive
from kernels.hopper.softmax import (
    as_operand,
    finish_rows,
    make_rows,
    masked_scores,
    probabilities,
    times_rows,
)
from kernels.hopper.tiles import ROWS, SECTION_BYTES, forward_plan
from kernels.hopper.walk import Call, M, group_tiles, row_tile_keys
from kernels.options import AttentionOptions
from kernels.triton.primitives import LOG2E


class Shared(NamedTuple):
    """Tiles in shared memory, and for each a barrier that it is full and one that it is empty.

    A stage of the ring holds the keys of one tile and the values of the tile before it: those are
    the two products that a consumer issues together.
    """

    q: gl.shared_memory_descriptor  # (q_stages * groups, 1, 1, M, D)
    k: gl.shared_memory_descriptor  # (stages, 1, 1, N, D)
    v: gl.shared_memory_descriptor
    out: gl.shared_memory_descriptor  # (groups, 1, 1, M, D)
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


# ---- the producer


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
def _produce(q, k, v, shared, box, counter, order, call, plan: gl.constexpr):
    """Draw row tiles, load their queries, and walk over their keys from the last to the first."""
    N: gl.constexpr = plan.block_n
    GROUPS: gl.constexpr = plan.groups
    STAGES: gl.constexpr = plan.stages
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
                _load_q(q, shared, q_slot, q_phase, batch, head, start_m)
            mbarrier.wait(shared.empty.index(stage), ((c // STAGES) & 1) ^ 1)
            mbarrier.expect(shared.full.index(stage), k.block_type.nbytes, pred=c == 0)
            mbarrier.expect(shared.full.index(stage), 2 * k.block_type.nbytes, pred=c > 0)
            at = [batch, kv_head, key_tile * N, 0]
            tma_load(k, at, shared.full.index(stage), shared.k.index(stage))
            _load_v(v, shared, stage, v_batch, v_head, v_tile, c > 0, N)
            if step == 0:
                # behind the first keys: the first group can begin, the others wait their turn
                for g in gl.static_range(1, GROUPS):
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


# ---- a consumer group


@gluon.jit
def _scores(shared, q_slot, stage, S: gl.constexpr):
    """Issue q k^T for one tile: (M, N) in layout S, to be waited for."""
    D: gl.constexpr = shared.q.shape[4]
    N: gl.constexpr = shared.k.shape[3]
    q = shared.q.index(q_slot).reshape([M, D])
    k = shared.k.index(stage).reshape([N, D]).permute((1, 0))
    zero = gl.zeros([M, N], gl.float32, layout=S)
    return warpgroup_mma(q, k, zero, use_acc=False, is_async=True)


@gluon.jit
def _add_values(acc, p, shared, stage):
    """Issue acc + p v for one tile: (M, D), to be waited for."""
    D: gl.constexpr = shared.v.shape[4]
    N: gl.constexpr = shared.v.shape[3]
    return warpgroup_mma(p, shared.v.index(stage).reshape([N, D]), acc, is_async=True)


@gluon.jit
def _attend(
    n, acc, p, m_i, l_i, key_tile, c, shared, q_slot, rows, call,
    plan: gl.constexpr, S: gl.constexpr, O: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Fold n key tiles before `key_tile` into the running sums, from the last one down.

    acc (M, D) lacks the values that p, the probabilities of the tile before, weighs; m_i is the
    maximum of the raw scores, l_i (M, 4) the sums of probabilities by thread; c counts stages.
    """
    for _ in range(n):
        key_tile -= 1
        start_n = key_tile * plan.block_n
        stage = c % plan.stages
        mbarrier.wait(shared.full.index(stage), (c // plan.stages) & 1)
        s = _scores(shared, q_slot, stage, S)
        acc = _add_values(acc, p, shared, stage)
        s = warpgroup_mma_wait(1, deps=(s,))
        s = masked_scores(s, start_n, rows, call, plan, MASKED)
        m_new = gl.maximum(m_i, gl.max(s, 1))
        # p is a register operand: it must live until its product is done
        acc, p = warpgroup_mma_wait(0, deps=(acc, p))
        mbarrier.arrive(shared.empty.index(stage), count=1)
        p, l, pivot = probabilities(s, m_new, start_n, rows, call, plan, MASKED)
        alpha = exp2(m_i * call.scale_log2 - pivot)
        l_i = times_rows(l_i, alpha) + l
        acc = times_rows(acc, alpha)
        p = as_operand(p, shared.q.dtype, O)
        m_i = m_new
        c += 1
    return acc, p, m_i, l_i, key_tile, c


@gluon.jit
def _consume(out, lse_ptr, shared, box, order, call, cid: gl.constexpr, plan: gl.constexpr):
    """Attend from the queries of group cid, row tile after row tile.

    The first scores of the next row tile are issued behind the last values of this one, so that
    the tensor cores work while the output is scaled and stored.
    """
    D: gl.constexpr = plan.block_d
    N: gl.constexpr = plan.block_n
    STAGES: gl.constexpr = plan.stages
    DTYPE: gl.constexpr = shared.q.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    FIRST_MASKED: gl.constexpr = plan.cut > 0 or plan.low
    total = order.n_tiles * order.n_heads
    i = 0
    c = 0
    tile = gl.program_id(0)
    row_tile, batch_head = locate(tile, order, plan.features.causal)
    start_m = row_tile * (plan.groups * M)
    batch = batch_head // call.n_head
    skipped, last, high, whole, low = group_tiles(start_m, cid, batch, call, plan)
    mbarrier.wait(shared.q_full.index(cid), 0)
    if plan.skips:
        for _ in range(skipped):
            mbarrier.wait(shared.full.index(c % STAGES), (c // STAGES) & 1)
            mbarrier.arrive(shared.empty.index(c % STAGES), count=1)
            c += 1
    mbarrier.wait(shared.full.index(c % STAGES), (c // STAGES) & 1)
    s = warpgroup_mma_wait(0, deps=(_scores(shared, cid, c % STAGES, S),))
    mbarrier.arrive(shared.empty.index(c % STAGES), count=1)
    c += 1
    while tile < total:
        q_slot = (i % plan.q_stages) * plan.groups + cid
        own_m = start_m + cid * M
        head = batch_head % call.n_head
        lse_tile = lse_ptr + batch_head.to(gl.int64) * call.seq_q + own_m
        rows = make_rows(own_m, batch, batch_head, call, plan, S)
        key_tile = last
        s = masked_scores(s, key_tile * N, rows, call, plan, FIRST_MASKED)
        m_i = gl.max(s, 1)
        p, l_i, _ = probabilities(s, m_i, key_tile * N, rows, call, plan, FIRST_MASKED)
        p = as_operand(p, DTYPE, O)
        acc = gl.zeros([M, D], gl.float32, layout=O)
        if plan.cut > 1:
            acc, p, m_i, l_i, key_tile, c = _attend(
                high, acc, p, m_i, l_i, key_tile, c, shared, q_slot, rows, call, plan, S, O, True
            )
        acc, p, m_i, l_i, key_tile, c = _attend(
            whole, acc, p, m_i, l_i, key_tile, c, shared, q_slot, rows, call, plan, S, O, False
        )
        if plan.low:
            acc, p, m_i, l_i, key_tile, c = _attend(
                low, acc, p, m_i, l_i, key_tile, c, shared, q_slot, rows, call, plan, S, O, True
            )

        # The last values of this row tile, and behind it the first scores of the next one
        mbarrier.arrive(shared.q_empty.index(q_slot), count=1)
        lse, factor = finish_rows(m_i, l_i, head, call, plan)
        out_at = [batch, head, own_m, 0]
        tile = receive(box, i)
        i += 1
        more = tile < total
        row_tile, batch_head = locate(tile, order, plan.features.causal)
        start_m = row_tile * (plan.groups * M)
        batch = gl.where(more, batch_head // call.n_head, 0)
        skipped, last, high, whole, low = group_tiles(start_m, cid, batch, call, plan)
        stage = c % STAGES
        mbarrier.wait(shared.full.index(stage), (c // STAGES) & 1)
        acc = _add_values(acc, p, shared, stage)
        q_slot = (i % plan.q_stages) * plan.groups + cid
        mbarrier.wait(shared.q_full.index(q_slot), (i // plan.q_stages) & 1, pred=more)
        if plan.skips:
            skipped = gl.where(more, skipped, 0)
            for ahead in range(c + 1, c + 1 + skipped):
                mbarrier.wait(shared.full.index(ahead % STAGES), (ahead // STAGES) & 1)
            s = _scores(shared, q_slot, (c + skipped) % STAGES, S)
        else:
            s = _scores(shared, q_slot, stage, S)

        row = gl.arange(0, M, layout=gl.SliceLayout(1, S))
        gl.store(lse_tile + row, lse, mask=row < call.seq_q - own_m)
        acc, p = warpgroup_mma_wait(1, deps=(acc, p))
        acc = times_rows(acc, factor)
        tma.store_wait(0)
        shared.out.index(cid).reshape([M, D]).store(round_to(acc, DTYPE))
        fence_async_shared()
        tma_store(out, out_at, shared.out.index(cid))
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(shared.empty.index(stage), count=1)
        c += 1
        if plan.skips:
            for _ in range(skipped):
                mbarrier.arrive(shared.empty.index(c % STAGES), count=1)
                c += 1
    tma.store_wait(0)


# ---- the kernel


@gluon.jit(
    do_not_specialize=[
        "seq_q", "seq_k", "n_head", "group", "window_size", "threshold",
        "n_tiles", "n_heads", "section",
    ],
    do_not_specialize_on_alignment=["seed_ptr", "doc_ptr", "lengths_ptr", "sinks_ptr"],
)  # fmt: skip
def attn_fwd_kernel(
    q,
    k,
    v,
    out,
    lse_ptr,
    counter,
    seed_ptr,
    doc_ptr,
    lengths_ptr,
    sinks_ptr,
    seq_q,
    seq_k,
    n_head,
    group,
    window_size,
    scale_log2,
    softcap_scale,
    keep_scale,
    threshold,
    n_tiles,
    n_heads,
    section,
    plan: gl.constexpr,
):
    D: gl.constexpr = plan.block_d
    N: gl.constexpr = plan.block_n
    GROUPS: gl.constexpr = plan.groups
    STAGES: gl.constexpr = plan.stages
    Q_SLOTS: gl.constexpr = plan.q_stages * GROUPS
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    shared = Shared(
        gl.allocate_shared_memory(q.dtype, [Q_SLOTS, 1, 1, M, D], q.layout),
        gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, N, D], k.layout),
        gl.allocate_shared_memory(v.dtype, [STAGES, 1, 1, N, D], v.layout),
        gl.allocate_shared_memory(out.dtype, [GROUPS, 1, 1, M, D], out.layout),
        gl.allocate_shared_memory(gl.int64, [Q_SLOTS, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [Q_SLOTS, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier),
    )
    for j in gl.static_range(Q_SLOTS):
        mbarrier.init(shared.q_full.index(j), count=1)
        mbarrier.init(shared.q_empty.index(j), count=1)
    for j in gl.static_range(STAGES):
        mbarrier.init(shared.full.index(j), count=1)
        mbarrier.init(shared.empty.index(j), count=GROUPS)
    box = make_mailbox(GROUPS)
    fence_async_shared()
    order = Order(n_tiles, n_heads, section)
    call = Call(
        seq_q, seq_k, n_head, group, window_size, scale_log2, softcap_scale, keep_scale, threshold,
        seed_ptr, doc_ptr, lengths_ptr, sinks_ptr,
    )  # fmt: skip
    CONSUMER: gl.constexpr = plan.consumer_registers
    PRODUCER: gl.constexpr = plan.producer_registers
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_consume, (out, lse_ptr, shared, box, order, call, 0, plan)),
                (_consume, (out, lse_ptr, shared, box, order, call, 1, plan)),
                (_produce, (q, k, v, shared, box, counter, order, call, plan)),
            ],
            [4, 1],
            [CONSUMER, PRODUCER],
        )
    elif GROUPS == 3:
        gl.warp_specialize(
            [
                (_consume, (out, lse_ptr, shared, box, order, call, 0, plan)),
                (_consume, (out, lse_ptr, shared, box, order, call, 1, plan)),
                (_consume, (out, lse_ptr, shared, box, order, call, 2, plan)),
                (_produce, (q, k, v, shared, box, counter, order, call, plan)),
            ],
            [4, 4, 1],
            [CONSUMER, CONSUMER, PRODUCER],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (out, lse_ptr, shared, box, order, call, 0, plan)),
                (_consume, (out, lse_ptr, shared, box, order, call, 1, plan)),
                (_consume, (out, lse_ptr, shared, box, order, call, 2, plan)),
                (_consume, (out, lse_ptr, shared, box, order, call, 3, plan)),
                (_produce, (q, k, v, shared, box, counter, order, call, plan)),
            ],
            [4, 4, 4, 1],
            [CONSUMER, CONSUMER, CONSUMER, PRODUCER],
        )


# ---- the launch

_launches: dict[tuple, Callable[..., None]] = {}


def attn_fwd(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """Launch the forward kernel.

    Args:
        q: (B, T_q, H, D) fp16 or bf16, D up to 128; k, v: (B, T_k, H_kv, D). Strides and options
            as `kernels.hopper.obstacle` asks.

    Returns:
        out (B, T_q, H, D) in the dtype of q and lse (B, H, T_q) fp32, natural logarithm.
    """
    q, k, v = readable(q), readable(k), readable(v)
    device = q.device
    B, T_q, H, D = q.shape
    T_k, H_kv = k.shape[1:3]
    out = torch.empty((B, T_q, H, D), dtype=q.dtype, device=device)
    lse = torch.empty((B, H, T_q), dtype=torch.float32, device=device)
    plan = forward_plan(D, T_q, T_k, options.features)
    n_tiles = -(-T_q // (plan.groups * ROWS))
    # heads whose keys and values fit in the L2 cache together; query heads of a group share theirs
    section = max(1, SECTION_BYTES // (4 * T_k * D)) * (H // H_kv)
    stream = torch.cuda.current_stream(device).cuda_stream
    operands = (tiled(q), tiled(k), tiled(v), tiled(out))
    softcap = options.softcap
    arguments = (
        lse, tile_counters.pair(device, stream),
        options.dropout_seed, options.doc_start, options.kv_lengths, options.sinks,
        T_q, T_k, H, H // H_kv, options.window_size,
        (softcap or options.softmax_scale) * LOG2E.value,
        options.softmax_scale / softcap if softcap else 0.0,
        1.0 / (1.0 - options.dropout_p), _as_int32(int(options.dropout_p * 2**32)),
        n_tiles, B * H, min(section, B * H),
    )  # fmt: skip
    key = (device.index, q.dtype, plan)
    launch = _launches.get(key)
    if launch is None:
        rows = (ROWS, plan.block_n, plan.block_n, ROWS)
        launch = _launches[key] = compile_for(
            attn_fwd_kernel,
            [(x, n, plan.block_d) for x, n in zip(operands, rows, strict=True)],
            arguments,
            plan,
        )
    launch(min(n_multiprocessors(device), n_tiles * B * H), stream, *operands, *arguments)
    return out, lse


def _as_int32(x: int) -> int:
    """The signed number with the 32 bits of x, which a kernel's argument can hold."""
    return x - 2**32 if x >= 2**31 else x
