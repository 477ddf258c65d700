"""The forward pass for Hopper (H100, H200), in Gluon: docs/hopper.md tells how it works.

One program runs on each multiprocessor and takes row tiles until there are none. Its producer warp
loads tiles with the copy engine; two to four consumer groups of four warps own 64 queries each.
They meet at barriers in shared memory: the producer fills a stage of a ring that all groups have
emptied. Under a block-sparse mask a program may have several such teams, of one or two groups.

Letters: B batch, T tokens, H heads, D head_dim; M queries of a group, N keys of a tile.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import runtime
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ...options import AttentionOptions
from ..launch import (
    Kernel,
    as_int32,
    compile_kernel,
    described,
    n_multiprocessors,
    tile_counters,
    tile_type,
)
from ..scheduler import Order, make_mailbox
from .consumer import consume
from .plan import ROWS, SECTION_BYTES, Plan, forward_plan
from .producer import produce
from .tiles import Call, M


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


@gluon.jit
def _make_team(q, k, v, out, plan: gl.constexpr):
    """What the producer and the consumers of a team share, and how they send tile numbers."""
    D: gl.constexpr = plan.block_d
    N: gl.constexpr = plan.block_n
    GROUPS: gl.constexpr = plan.groups
    STAGES: gl.constexpr = plan.stages
    Q_SLOTS: gl.constexpr = plan.q_stages * GROUPS
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    q_tiles = gl.allocate_shared_memory(q.dtype, [Q_SLOTS, 1, 1, M, D], q.layout)
    if plan.out_over_q:
        out_tiles = q_tiles
    else:
        out_tiles = gl.allocate_shared_memory(out.dtype, [GROUPS, 1, 1, M, D], out.layout)
    shared = Shared(
        q_tiles,
        gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, N, D], k.layout),
        gl.allocate_shared_memory(v.dtype, [STAGES, 1, 1, N, D], v.layout),
        out_tiles,
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
    return shared, make_mailbox(GROUPS)


@gluon.jit
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
    rows_ptr,
    row_blocks_ptr,
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
    mask_stride,
    plan: gl.constexpr,
):
    # as many teams as there may be: a program without one more has it twice, and nobody for it
    a = _make_team(q, k, v, out, plan)
    b = _make_team(q, k, v, out, plan) if plan.teams > 1 else a
    c = _make_team(q, k, v, out, plan) if plan.teams > 2 else a
    teams = (a, b, c)
    fence_async_shared()
    order = Order(n_tiles, n_heads, section)
    call = Call(
        seq_q, seq_k, n_head, group, window_size, scale_log2, softcap_scale, keep_scale, threshold,
        seed_ptr, doc_ptr, lengths_ptr, sinks_ptr, rows_ptr, row_blocks_ptr, mask_stride,
    )  # fmt: skip
    CONSUMERS: gl.constexpr = plan.teams * plan.groups
    WARPS: gl.constexpr = plan.worker_warps
    REGISTERS: gl.constexpr = plan.worker_registers
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consume, (out, lse_ptr, teams, order, call, 0, plan)),
                (consume, (out, lse_ptr, teams, order, call, 1, plan)),
                (produce, (q, k, v, teams, counter, order, call, 0, plan)),
                (produce, (q, k, v, teams, counter, order, call, 1, plan)),
                (produce, (q, k, v, teams, counter, order, call, 2, plan)),
            ],
            WARPS,
            REGISTERS,
        )
    elif CONSUMERS == 3:
        gl.warp_specialize(
            [
                (consume, (out, lse_ptr, teams, order, call, 0, plan)),
                (consume, (out, lse_ptr, teams, order, call, 1, plan)),
                (consume, (out, lse_ptr, teams, order, call, 2, plan)),
                (produce, (q, k, v, teams, counter, order, call, 0, plan)),
                (produce, (q, k, v, teams, counter, order, call, 1, plan)),
                (produce, (q, k, v, teams, counter, order, call, 2, plan)),
            ],
            WARPS,
            REGISTERS,
        )
    else:
        gl.warp_specialize(
            [
                (consume, (out, lse_ptr, teams, order, call, 0, plan)),
                (consume, (out, lse_ptr, teams, order, call, 1, plan)),
                (consume, (out, lse_ptr, teams, order, call, 2, plan)),
                (consume, (out, lse_ptr, teams, order, call, 3, plan)),
                (produce, (q, k, v, teams, counter, order, call, 0, plan)),
                (produce, (q, k, v, teams, counter, order, call, 1, plan)),
                (produce, (q, k, v, teams, counter, order, call, 2, plan)),
            ],
            WARPS,
            REGISTERS,
        )


# ---- the launch


def compile_fwd(plan: Plan, dtype: torch.dtype) -> Any:
    """The kernel for this plan and for q, k and v of this dtype: this needs no GPU."""
    features = plan.features
    q_tile = tile_type(ROWS, plan.block_d, dtype)
    k_tile = tile_type(plan.block_n, plan.block_d, dtype)
    types = [
        *(q_tile, k_tile, k_tile, q_tile),
        *("*fp32", "*i32"),  # lse and counter
        "*i64" if features.dropout else None,
        "*i32" if features.documents else None,
        "*i32" if features.lengths else None,
        "*fp32" if features.sinks else None,
        *["*i32" if plan.listed else None] * 2,
        *["i32"] * 5,
        *["fp32"] * 3,
        *["i32"] * 5,
    ]
    return compile_kernel(attn_fwd_kernel, types, plan)


@functools.cache
def _kernel(device: int, dtype: torch.dtype, plan: Plan) -> Kernel:
    return Kernel(compile_fwd(plan, dtype))


def attn_fwd(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """Launch the forward kernel.

    Args:
        q: (B, T_q, H, D) fp16 or bf16, D up to 256; k, v: (B, T_k, H_kv, D). Strides and options
            as `kernels.hopper.unsupported_reason` asks.

    Returns:
        out (B, T_q, H, D) in the dtype of q and lse (B, H, T_q) fp32, natural logarithm.
    """
    device, dtype = q.device, q.dtype
    B, T_q, H, D = q.shape
    T_k, H_kv = k.shape[1:3]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty((B, H, T_q), dtype=torch.float32)
    plan = forward_plan(D, T_q, T_k, options.features)
    n_tiles = -(-T_q // (plan.groups * ROWS))
    rows = options.mask_rows
    mask_stride = 0 if rows is None or rows.shape[0] == 1 else rows.stride(0)
    # heads whose keys and values fit in the L2 cache together; query heads of a group share theirs
    section = max(1, SECTION_BYTES // (4 * T_k * D)) * (H // H_kv)
    stream = runtime.driver.active.get_current_stream(device.index)  # its handle, without an object
    q_map, q = described(q, ROWS)
    k_map, k = described(k, plan.block_n)
    v_map, v = described(v, plan.block_n)
    out_map, _ = described(out, ROWS)
    tensors = (
        lse, tile_counters.pair(device, stream),
        options.dropout_seed, options.doc_start, options.kv_lengths, options.sinks,
        rows, options.mask_row_blocks,
    )  # fmt: skip
    _kernel(device.index, dtype, plan).launch(
        min(n_multiprocessors(device), -(-n_tiles * B * H // plan.teams)),
        stream,
        q_map, k_map, v_map, out_map,
        *[x.data_ptr() for x in tensors if x is not None],
        T_q, T_k, H, H // H_kv, options.window_size,
        options.scale_log2, options.softcap_scale,
        options.keep_scale, as_int32(options.drop_threshold),
        n_tiles, B * H, min(section, B * H), mask_stride,
    )  # fmt: skip
    return out, lse
