"""Forward pass for Hopper (H100, H200), in Gluon; docs/hopper.md explains the design.

One persistent program runs on each SM. Its producer warp loads tiles with the copy engine (TMA),
and two to four consumer groups of four warps process 64 queries each (`kernels.hopper.pipeline`).
Under a block-sparse mask a program may have several such teams, of one or two groups.

Letters: B batch, T tokens, H heads, D head_dim; M queries of a group, N keys of a tile.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ..call import Call
from ..gluon import join
from ..pipeline import make_full_and_empty
from ..scheduler import Order, make_work_queue
from .consumer import consume
from .producer import produce
from .tiles import M


class Shared(NamedTuple):
    """Rings of tiles in shared memory, with their barriers."""

    q: gl.shared_memory_descriptor  # (q_stages * groups, 1, 1, M, D)
    k: gl.shared_memory_descriptor  # (stages, 1, 1, N, D)
    v: gl.shared_memory_descriptor  # of the tile before that of k: both are multiplied together
    out: gl.shared_memory_descriptor  # (groups, 1, 1, M, D)
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


@gluon.jit
def _make_team(q, k, v, out, plan: gl.constexpr):
    """Allocate `Shared` and the work queue of a team."""
    D: gl.constexpr = plan.block_d
    N: gl.constexpr = plan.block_n
    GROUPS: gl.constexpr = plan.groups
    STAGES: gl.constexpr = plan.stages
    Q_SLOTS: gl.constexpr = plan.q_stages * GROUPS
    q_tiles = gl.allocate_shared_memory(q.dtype, [Q_SLOTS, 1, 1, M, D], q.layout)
    # Above 128 columns there is no room for both.
    if plan.out_over_q:
        out_tiles = q_tiles
    else:
        out_tiles = gl.allocate_shared_memory(out.dtype, [GROUPS, 1, 1, M, D], out.layout)
    shared = Shared(
        q_tiles,
        gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, N, D], k.layout),
        gl.allocate_shared_memory(v.dtype, [STAGES, 1, 1, N, D], v.layout),
        out_tiles,
        # Queries are read by one group, keys and values by all groups of the team.
        *make_full_and_empty(Q_SLOTS, 1),
        *make_full_and_empty(STAGES, GROUPS),
    )
    return shared, make_work_queue(GROUPS)


@gluon.jit
def attn_fwd_kernel(
    q, k, v, out, lse_ptr, counter, seed_ptr, doc_ptr, lengths_ptr, sinks_ptr, slopes_ptr,
    rows_ptr, row_blocks_ptr, seq_q, seq_k, n_head, group, window_size, scale_log2, softcap_scale,
    keep_scale, threshold, n_tiles, n_heads, section, mask_stride, first_query, plan: gl.constexpr,
):  # fmt: skip
    # A tuple of fixed length: without a second or third team, its entry is not used.
    a = _make_team(q, k, v, out, plan)
    b = _make_team(q, k, v, out, plan) if plan.teams > 1 else a
    c = _make_team(q, k, v, out, plan) if plan.teams > 2 else a
    teams = (a, b, c)
    # The copy engine must see the barriers as they were initialized.
    fence_async_shared()
    order = Order(n_tiles, n_heads, section)
    call = Call(
        seq_q, seq_k, n_head, group, window_size, None, scale_log2, softcap_scale, keep_scale,
        threshold, first_query, seed_ptr, lengths_ptr, doc_ptr, sinks_ptr=sinks_ptr,
        slopes_ptr=slopes_ptr, rows_ptr=rows_ptr, row_blocks_ptr=row_blocks_ptr,
        mask_stride=mask_stride,
    )  # fmt: skip
    CONSUMERS: gl.constexpr = plan.teams * plan.groups
    WARPS: gl.constexpr = plan.worker_warps
    REGISTERS: gl.constexpr = plan.worker_registers
    # The first role is not in WARPS and REGISTERS: it has four warps, and what registers the others
    # leave. So it has to be a consumer, and producers come last.
    gl.warp_specialize(
        join(
            [
                (consume, (out, lse_ptr, teams, order, call, 0, plan)),
                (consume, (out, lse_ptr, teams, order, call, 1, plan)),
                (consume, (out, lse_ptr, teams, order, call, 2, plan)),
                (consume, (out, lse_ptr, teams, order, call, 3, plan)),
            ][:CONSUMERS],
            [
                (produce, (q, k, v, teams, counter, order, call, 0, plan)),
                (produce, (q, k, v, teams, counter, order, call, 1, plan)),
                (produce, (q, k, v, teams, counter, order, call, 2, plan)),
            ],
        ),
        WARPS, REGISTERS,
    )  # fmt: skip
