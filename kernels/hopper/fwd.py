"""The forward pass for Hopper (H100, H200), in Gluon: docs/hopper.md tells how it works.

One program runs on each multiprocessor and takes row tiles until there are none. Its producer warp
loads tiles with the copy engine; two or three consumer groups of four warps own 64 queries each.
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
from kernels.hopper.launch import compile_for, n_multiprocessors, tile_counters, tiled
from kernels.hopper.schedule import draw, finish, locate, make_mailbox, post, receive
from kernels.hopper.tiles import KEYS, SECTION_BYTES, forward_tiles
from kernels.options import AttentionOptions
from kernels.triton.primitives import LN2, LOG2E
from kernels.triton.walks import visible_keys

M = gl.constexpr(64)  # queries of a consumer group: the rows of one wgmma


class Shared(NamedTuple):
    """Tiles in shared memory, and for each a barrier that it is full and one that it is empty.

    A stage of the ring holds the keys of one tile and the values of the tile before it: those are
    the two products that a consumer issues together.
    """

    q: gl.shared_memory_descriptor  # (Q_STAGES * GROUPS, 1, 1, M, D)
    k: gl.shared_memory_descriptor  # (STAGES, 1, 1, N, D)
    v: gl.shared_memory_descriptor
    out: gl.shared_memory_descriptor  # (GROUPS, 1, 1, M, D)
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


class Sizes(NamedTuple):
    """Numbers of a launch: lengths, heads, and how row tiles are counted."""

    seq_q: gl.tensor
    seq_k: gl.tensor
    n_head: gl.tensor
    group: gl.tensor  # query heads of a key-value head
    n_tiles: gl.tensor  # row tiles of a head
    n_heads: gl.tensor  # batch times heads
    section: gl.tensor  # heads that are worked on together


# ---- which key tiles are visited


@gluon.jit
def _key_tiles(start_m, ROWS: gl.constexpr, sizes, N: gl.constexpr, features: gl.constexpr):
    """[first, end): the key tiles that the ROWS queries from start_m on see; at least one."""
    last_m = gl.minimum(start_m + ROWS, sizes.seq_q) - 1
    _, end = visible_keys(last_m, sizes.seq_k, sizes.seq_k - sizes.seq_q, 0, features)
    return 0, gl.maximum(gl.cdiv(end, N), 1)


@gluon.jit
def _own_tiles(
    start_m,
    cid: gl.constexpr,
    sizes,
    N: gl.constexpr,
    GROUPS: gl.constexpr,
    CUT: gl.constexpr,
    features: gl.constexpr,
):
    """What group cid does with the key tiles of the row tile at start_m, from the last one down.

    Returns:
        (skipped, cut, whole, last): tiles that it does not see at all; after its first one, tiles
        that it must mask, and tiles that it sees whole; and the number of its first one.
    """
    first, end = _key_tiles(start_m, GROUPS * M, sizes, N, features)
    own_end = end
    if features.causal:
        _, own_end = _key_tiles(start_m + cid * M, M, sizes, N, features)
        own_end = gl.minimum(own_end, end)
    last = own_end - 1
    cut = 0
    if CUT > 1:
        diagonal = sizes.seq_k - sizes.seq_q
        _, whole_end = visible_keys(start_m + cid * M, sizes.seq_k, diagonal, 0, features)
        cut = gl.maximum(last - gl.maximum(gl.maximum(whole_end, 0) // N, first), 0)
    return end - own_end, cut, last - cut - first, last


# ---- the producer


@gluon.jit
def _load_v(v, shared, stage, batch, head, tile, there, N: gl.constexpr):
    tma_load(v, [batch, head, tile * N, 0], shared.full.index(stage), shared.v.index(stage), there)


@gluon.jit
def _produce(
    q,
    k,
    v,
    shared,
    box,
    counter,
    sizes,
    N: gl.constexpr,
    GROUPS: gl.constexpr,
    STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr,
    features: gl.constexpr,
):
    """Draw row tiles, load their queries, and walk over their keys from the last to the first."""
    total = sizes.n_tiles * sizes.n_heads
    i = 0  # row tiles so far
    c = 0  # stages of the ring so far
    v_batch = 0  # where the values of the tile before this one are
    v_head = 0
    v_tile = 0
    tile = gl.program_id(0)
    while tile < total:
        row_tile, batch_head = locate(
            tile, sizes.n_tiles, sizes.n_heads, sizes.section, features.causal
        )
        batch = batch_head // sizes.n_head
        head = batch_head % sizes.n_head
        kv_head = head // sizes.group
        start_m = row_tile * (GROUPS * M)
        first, end = _key_tiles(start_m, GROUPS * M, sizes, N, features)
        q_stage = i % Q_STAGES * GROUPS
        q_phase = ((i // Q_STAGES) & 1) ^ 1
        for step in range(end - first):
            key_tile = end - 1 - step
            stage = c % STAGES
            if step == 0:
                mbarrier.wait(shared.q_empty.index(q_stage), q_phase)
                mbarrier.expect(shared.q_full.index(q_stage), q.block_type.nbytes)
                to = shared.q.index(q_stage)
                tma_load(q, [batch, head, start_m, 0], shared.q_full.index(q_stage), to)
            mbarrier.wait(shared.empty.index(stage), ((c // STAGES) & 1) ^ 1)
            mbarrier.expect(shared.full.index(stage), k.block_type.nbytes, pred=c == 0)
            mbarrier.expect(shared.full.index(stage), 2 * k.block_type.nbytes, pred=c > 0)
            at = [batch, kv_head, key_tile * N, 0]
            tma_load(k, at, shared.full.index(stage), shared.k.index(stage))
            _load_v(v, shared, stage, v_batch, v_head, v_tile, c > 0, N)
            if step == 0:
                # behind the first keys: the first group can begin, the others wait their turn
                for cid in gl.static_range(1, GROUPS):
                    mbarrier.wait(shared.q_empty.index(q_stage + cid), q_phase)
                    mbarrier.expect(shared.q_full.index(q_stage + cid), q.block_type.nbytes)
                    at = [batch, head, start_m + cid * M, 0]
                    to = shared.q.index(q_stage + cid)
                    tma_load(q, at, shared.q_full.index(q_stage + cid), to)
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
def _row_parts(p):
    """(M, 4) sums of what each of the four threads of a row holds: they add up once, at the end."""
    return gl.sum(gl.sum(p.reshape([M, p.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def _times_rows(x, factor):
    """x with each row times its factor, which lies in the thread that needs it."""
    rows: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    return x * gl.expand_dims(gl.convert_layout(factor, rows, assert_trivial=True), 1)


@gluon.jit
def _mask(s, start_n, upper):
    """Scores with those of hidden keys at -inf."""
    keys = start_n + gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s.type.layout))
    seen = gl.expand_dims(keys, 0) < gl.expand_dims(upper, 1)
    return gl.where(seen, s, -float("inf"))


@gluon.jit
def _pivot(m_i, scale_log2, MASKED: gl.constexpr):
    """What is subtracted from a row's scores: its maximum, or 0 if it has seen no key yet."""
    if MASKED:
        return gl.where(m_i == -float("inf"), 0.0, m_i * scale_log2)
    else:
        return m_i * scale_log2


@gluon.jit
def _attend(
    acc, p, m_i, l_i, shared, q_slot, c, start_n, upper, scale_log2,
    S: gl.constexpr, O: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Fold the values of the tile before and the keys of this one into the running sums.

    acc (M, D) lacks the values that p, the probabilities of the tile before, weighs; m_i is the
    maximum of the raw scores, l_i (M, 4) the sums of probabilities by thread.
    """
    DTYPE: gl.constexpr = shared.q.dtype
    stage = c % STAGES
    mbarrier.wait(shared.full.index(stage), (c // STAGES) & 1)
    s = _scores(shared, q_slot, stage, S)
    acc = _add_values(acc, p, shared, stage)
    s = warpgroup_mma_wait(1, deps=(s,))
    if MASKED:
        s = _mask(s, start_n, upper)
    m_new = gl.maximum(m_i, gl.max(s, 1))
    # p is a register operand: it must live until its product is done
    acc, p = warpgroup_mma_wait(0, deps=(acc, p))
    mbarrier.arrive(shared.empty.index(stage), count=1)
    pivot = _pivot(m_new, scale_log2, MASKED)
    alpha = exp2(m_i * scale_log2 - pivot)
    p = exp2(s * scale_log2 - gl.expand_dims(pivot, 1))
    l_i = _times_rows(l_i, alpha) + _row_parts(p)
    acc = _times_rows(acc, alpha)
    p = gl.convert_layout(round_to(p, DTYPE), gl.DotOperandLayout(0, O, 2))
    return acc, p, m_new, l_i


@gluon.jit
def _attend_first(
    s, start_n, upper, scale_log2, O: gl.constexpr, DTYPE: gl.constexpr, MASKED: gl.constexpr
):
    """The start of the running sums from the scores of a row tile's first key tile: p, m_i, l_i."""
    if MASKED:
        s = _mask(s, start_n, upper)
    m_i = gl.max(s, 1)
    p = exp2(s * scale_log2 - gl.expand_dims(_pivot(m_i, scale_log2, MASKED), 1))
    l_i = _row_parts(p)
    return gl.convert_layout(round_to(p, DTYPE), gl.DotOperandLayout(0, O, 2)), m_i, l_i


@gluon.jit
def _consume(
    out,
    lse_ptr,
    shared,
    box,
    sizes,
    scale_log2,
    cid: gl.constexpr,
    GROUPS: gl.constexpr,
    STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr,
    CUT: gl.constexpr,
    features: gl.constexpr,
):
    """Attend from the queries of group cid, row tile after row tile.

    The first scores of the next row tile are issued behind the last values of this one, so that
    the tensor cores work while the output is scaled and stored.
    """
    D: gl.constexpr = shared.q.shape[4]
    N: gl.constexpr = shared.k.shape[3]
    DTYPE: gl.constexpr = shared.q.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    SKIPS: gl.constexpr = features.causal and (GROUPS * M > N or CUT > 1)
    total = sizes.n_tiles * sizes.n_heads
    i = 0
    c = 0
    tile = gl.program_id(0)
    row_tile, batch_head = locate(
        tile, sizes.n_tiles, sizes.n_heads, sizes.section, features.causal
    )
    start_m = row_tile * (GROUPS * M)
    skipped, cut, whole, last = _own_tiles(start_m, cid, sizes, N, GROUPS, CUT, features)
    mbarrier.wait(shared.q_full.index(cid), 0)
    if SKIPS:
        for _ in range(skipped):
            mbarrier.wait(shared.full.index(c % STAGES), (c // STAGES) & 1)
            mbarrier.arrive(shared.empty.index(c % STAGES), count=1)
            c += 1
    mbarrier.wait(shared.full.index(c % STAGES), (c // STAGES) & 1)
    s = warpgroup_mma_wait(0, deps=(_scores(shared, cid, c % STAGES, S),))
    mbarrier.arrive(shared.empty.index(c % STAGES), count=1)
    c += 1
    while tile < total:
        q_slot = (i % Q_STAGES) * GROUPS + cid
        own_m = start_m + cid * M
        rows = own_m + gl.arange(0, M, layout=gl.SliceLayout(1, S))
        lse_row = batch_head.to(gl.int64) * sizes.seq_q + rows
        _, upper = visible_keys(rows, sizes.seq_k, sizes.seq_k - sizes.seq_q, 0, features)
        p, m_i, l_i = _attend_first(s, last * N, upper, scale_log2, O, DTYPE, CUT > 0)
        acc = gl.zeros([M, D], gl.float32, layout=O)
        if CUT > 1:
            for step in range(cut):
                acc, p, m_i, l_i = _attend(
                    acc, p, m_i, l_i, shared, q_slot, c,
                    (last - 1 - step) * N, upper, scale_log2, S, O, STAGES, True,
                )  # fmt: skip
                c += 1
        for _ in range(whole):
            acc, p, m_i, l_i = _attend(
                acc, p, m_i, l_i, shared, q_slot, c,
                0, upper, scale_log2, S, O, STAGES, False,
            )  # fmt: skip
            c += 1

        # The last values of this row tile, and behind them the first scores of the next one
        mbarrier.arrive(shared.q_empty.index(q_slot), count=1)
        batch = batch_head // sizes.n_head
        head = batch_head % sizes.n_head
        tile = receive(box, i)
        i += 1
        more = tile < total
        row_tile, batch_head = locate(
            tile, sizes.n_tiles, sizes.n_heads, sizes.section, features.causal
        )
        start_m = row_tile * (GROUPS * M)
        skipped, cut, whole, last = _own_tiles(start_m, cid, sizes, N, GROUPS, CUT, features)
        stage = c % STAGES
        mbarrier.wait(shared.full.index(stage), (c // STAGES) & 1)
        acc = _add_values(acc, p, shared, stage)
        q_slot = (i % Q_STAGES) * GROUPS + cid
        mbarrier.wait(shared.q_full.index(q_slot), (i // Q_STAGES) & 1, pred=more)
        if SKIPS:
            skipped = gl.where(more, skipped, 0)
            for ahead in range(c + 1, c + 1 + skipped):
                mbarrier.wait(shared.full.index(ahead % STAGES), (ahead // STAGES) & 1)
            s = _scores(shared, q_slot, (c + skipped) % STAGES, S)
        else:
            s = _scores(shared, q_slot, stage, S)

        l_row = gl.convert_layout(gl.sum(l_i, 1), gl.SliceLayout(1, S))
        lse = (m_i * scale_log2 + gl.log2(l_row)) * LN2
        gl.store(lse_ptr + lse_row, lse, mask=rows < sizes.seq_q)
        acc, p = warpgroup_mma_wait(1, deps=(acc, p))
        # a row that sees no key: 0 / 1
        acc = _times_rows(acc, 1.0 / gl.where(l_row == 0.0, 1.0, l_row))
        tma.store_wait(0)
        shared.out.index(cid).reshape([M, D]).store(round_to(acc, DTYPE))
        fence_async_shared()
        tma_store(out, [batch, head, own_m, 0], shared.out.index(cid))
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(shared.empty.index(stage), count=1)
        c += 1
        if SKIPS:
            for _ in range(skipped):
                mbarrier.arrive(shared.empty.index(c % STAGES), count=1)
                c += 1
    tma.store_wait(0)


# ---- the kernel


@gluon.jit(do_not_specialize=["seq_q", "seq_k", "n_head", "group", "n_tiles", "n_heads", "section"])
def attn_fwd_kernel(
    q,
    k,
    v,
    out,
    lse_ptr,
    counter,
    seq_q,
    seq_k,
    n_head,
    group,
    n_tiles,
    n_heads,
    section,
    scale_log2,
    GROUPS: gl.constexpr,
    STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    CUT: gl.constexpr,
    features: gl.constexpr,
):
    D: gl.constexpr = k.block_type.shape[3]
    N: gl.constexpr = k.block_type.shape[2]
    q_slots: gl.constexpr = Q_STAGES * GROUPS
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    shared = Shared(
        gl.allocate_shared_memory(q.dtype, [q_slots, 1, 1, M, D], q.layout),
        gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, N, D], k.layout),
        gl.allocate_shared_memory(v.dtype, [STAGES, 1, 1, N, D], v.layout),
        gl.allocate_shared_memory(out.dtype, [GROUPS, 1, 1, M, D], out.layout),
        gl.allocate_shared_memory(gl.int64, [q_slots, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [q_slots, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier),
    )
    for j in gl.static_range(q_slots):
        mbarrier.init(shared.q_full.index(j), count=1)
        mbarrier.init(shared.q_empty.index(j), count=1)
    for j in gl.static_range(STAGES):
        mbarrier.init(shared.full.index(j), count=1)
        mbarrier.init(shared.empty.index(j), count=GROUPS)
    box = make_mailbox(GROUPS)
    fence_async_shared()
    sizes = Sizes(seq_q, seq_k, n_head, group, n_tiles, n_heads, section)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (
                    _consume,
                    (
                        out,
                        lse_ptr,
                        shared,
                        box,
                        sizes,
                        scale_log2,
                        0,
                        GROUPS,
                        STAGES,
                        Q_STAGES,
                        CUT,
                        features,
                    ),
                ),
                (
                    _consume,
                    (
                        out,
                        lse_ptr,
                        shared,
                        box,
                        sizes,
                        scale_log2,
                        1,
                        GROUPS,
                        STAGES,
                        Q_STAGES,
                        CUT,
                        features,
                    ),
                ),
                (
                    _produce,
                    (q, k, v, shared, box, counter, sizes, N, GROUPS, STAGES, Q_STAGES, features),
                ),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (
                    _consume,
                    (
                        out,
                        lse_ptr,
                        shared,
                        box,
                        sizes,
                        scale_log2,
                        0,
                        GROUPS,
                        STAGES,
                        Q_STAGES,
                        CUT,
                        features,
                    ),
                ),
                (
                    _consume,
                    (
                        out,
                        lse_ptr,
                        shared,
                        box,
                        sizes,
                        scale_log2,
                        1,
                        GROUPS,
                        STAGES,
                        Q_STAGES,
                        CUT,
                        features,
                    ),
                ),
                (
                    _consume,
                    (
                        out,
                        lse_ptr,
                        shared,
                        box,
                        sizes,
                        scale_log2,
                        2,
                        GROUPS,
                        STAGES,
                        Q_STAGES,
                        CUT,
                        features,
                    ),
                ),
                (
                    _produce,
                    (q, k, v, shared, box, counter, sizes, N, GROUPS, STAGES, Q_STAGES, features),
                ),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
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
    device = q.device
    B, T_q, H, D = q.shape
    T_k, H_kv = k.shape[1:3]
    out = torch.empty((B, T_q, H, D), dtype=q.dtype, device=device)
    lse = torch.empty((B, H, T_q), dtype=torch.float32, device=device)
    cut = cut_tiles(T_q, T_k, options.causal)
    tiles = forward_tiles(D, T_q, cut, options.causal)
    n_tiles = -(-T_q // (tiles.groups * 64))
    # heads whose keys and values fit in the L2 cache together; query heads of a group share theirs
    section = max(1, SECTION_BYTES // (4 * T_k * D)) * (H // H_kv)
    stream = torch.cuda.current_stream(device).cuda_stream
    operands = (tiled(q), tiled(k), tiled(v), tiled(out))
    arguments = (
        lse, tile_counters.pair(device, stream), T_q, T_k, H, H // H_kv, n_tiles, B * H,
        min(section, B * H), options.softmax_scale * LOG2E.value,
    )  # fmt: skip
    key = (device.index, q.dtype, tiles, cut, options.features)
    launch = _launches.get(key)
    if launch is None:
        rows = (64, tiles.block_n, tiles.block_n, 64)
        launch = _launches[key] = compile_for(
            attn_fwd_kernel,
            [(x, n, tiles.block_d) for x, n in zip(operands, rows, strict=True)],
            arguments,
            {**tiles.launch, "CUT": cut, "features": options.features},
        )
    launch(min(n_multiprocessors(device), n_tiles * B * H), stream, *operands, *arguments)
    return out, lse


def cut_tiles(seq_q: int, seq_k: int, causal: bool) -> int:
    """How many of the key tiles that a group visits first may need a mask: 0, 1, or 2 for more.

    A causal diagonal that begins on the edge of a tile stays within one tile of each group.
    """
    if causal:
        return 1 if seq_k >= seq_q and (seq_k - seq_q) % KEYS == 0 else 2
    return 0 if seq_k % KEYS == 0 else 1
