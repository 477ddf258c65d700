"""Backward pass for Hopper (H100, H200), in Gluon; docs/hopper.md explains the design.

FlashAttention-2's backward (arXiv 2307.08691, Algorithm 2) in one kernel: five matrix products a
tile. One persistent program runs on each SM. Two groups of four warps compute dk and dv of 64 keys
each; dq is accumulated across programs in a fixed order (`backward.semaphores`), so gradients
repeat bit for bit. Under a mask in blocks of 64 two programs run on each SM, with one group each.

Letters: B batch, T tokens, H heads, D head_dim; M queries of a row tile, N keys of a program.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ..call import Call
from ..gluon import join
from ..pipeline import make_barriers
from ..scheduler import Order, make_scalars, make_work_queue
from .dkdv import compute_dkdv
from .dkdv_dq import compute_dkdv_dq
from .dkdv_dq_block64 import compute_dkdv_dq_block64
from .dq import compute_dq
from .producer import produce
from .semaphores import DqSemaphore, make_dq_semaphore, run_dq_semaphore
from .tiles import GROUP_N, WORK_FIELDS, M


class Shared(NamedTuple):
    """Rings of tiles in shared memory, with their barriers."""

    q: gl.shared_memory_descriptor  # (stages, 1, 1, M, D)
    dout: gl.shared_memory_descriptor
    row_stats: gl.shared_memory_descriptor  # (stages, 2 * M): lse and delta
    k: gl.shared_memory_descriptor  # (kv_stages, 1, 1, N, D)
    v: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor  # (ds_stages, N, M)
    # (4 or 5, 1, 1, N / 2, D): tiles through which dv, dk and dq leave. With one group they leave
    # through tiles that it has read
    out: gl.shared_memory_descriptor | None
    # (stages, 1): number of the row tile in each stage under a block list, else None
    row_tile: gl.shared_memory_descriptor | None
    full: gl.shared_memory_descriptor  # q, dout and row_stats
    # One per group: between two uses of the same barriers Triton synchronizes all threads
    empty: tuple[gl.shared_memory_descriptor, ...]
    kv_full: gl.shared_memory_descriptor
    kv_empty: gl.shared_memory_descriptor
    ds_full: tuple[gl.shared_memory_descriptor, gl.shared_memory_descriptor] | None
    ds_empty: tuple[gl.shared_memory_descriptor, gl.shared_memory_descriptor] | None
    dq_semaphore: DqSemaphore


@gluon.jit
def attn_bwd_kernel(
    q, k, v, dout, row_stats, dq, dk, dv, sums_ptr, flags_ptr, counter, seed_ptr, lengths_ptr,
    doc_ptr, doc_tiles_ptr, doc_blocks_ptr, slopes_ptr, ranges_ptr, visits_ptr, splits_ptr,
    seq_q, seq_k, n_head, group, window_size, scale, scale_log2, softcap_scale, keep_scale,
    threshold, n_tiles, n_heads, section, mask_stride, first_query, plan: gl.constexpr,
):  # fmt: skip
    D: gl.constexpr = plan.block_d
    N: gl.constexpr = plan.block
    STAGES: gl.constexpr = plan.stages
    KV: gl.constexpr = plan.kv_stages
    DS: gl.constexpr = plan.ds_stages
    ONE: gl.constexpr = plan.groups == 1
    # Groups of keys, the dq group if there is one, and the two warps of dq semaphores
    READERS: gl.constexpr = plan.groups + (3 if plan.dq_group else 2)
    # The dq group has a tile of its own for dq. Otherwise dq leaves through that of dv.
    OUT: gl.constexpr = 5 if plan.dq_group else 4
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, M], q.dtype)
    # Shared memory is laid out in the order of these allocations. At 128 columns, other orders are
    # up to 8% slower with the same machine code.
    shared = Shared(
        gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, M, D], q.layout),
        gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, M, D], dout.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 2 * M], row_stats.layout),
        gl.allocate_shared_memory(q.dtype, [KV, 1, 1, N, D], k.layout),
        gl.allocate_shared_memory(q.dtype, [KV, 1, 1, N, D], v.layout),
        gl.allocate_shared_memory(q.dtype, [DS, N, M], ds_layout),
        None if ONE else gl.allocate_shared_memory(q.dtype, [OUT, 1, 1, GROUP_N, D], dk.layout),
        make_scalars(STAGES) if plan.has_block_list else None,
        make_barriers(STAGES, 1),
        # Make only barriers that are used: the compiler gives the memory of others to something
        # else, which is not safe (docs/hopper.md, What guards it).
        (make_barriers(STAGES, 1),)
        if ONE
        else (make_barriers(STAGES, 1), make_barriers(STAGES, 1)),
        make_barriers(KV, 1),
        make_barriers(KV, 3 if plan.dq_group else plan.groups),
        None if ONE else (make_barriers(DS, 1), make_barriers(DS, 1)),
        (make_barriers(DS, 1), make_barriers(DS, 1)) if plan.dq_group else None,
        make_dq_semaphore(1 if plan.dq_group else plan.groups, plan),
    )
    queue = make_work_queue(READERS, WORK_FIELDS if plan.has_block_list else 0)
    # The copy engine must see the barriers as they were initialized.
    fence_async_shared()
    order = Order(n_tiles, n_heads, section)
    call = Call(
        seq_q, seq_k, n_head, group, window_size, scale, scale_log2, softcap_scale, keep_scale,
        threshold, first_query, seed_ptr, lengths_ptr, doc_ptr, doc_tiles_ptr, doc_blocks_ptr,
        slopes_ptr=slopes_ptr, ranges_ptr=ranges_ptr, visits_ptr=visits_ptr, splits_ptr=splits_ptr,
        mask_stride=mask_stride,
    )  # fmt: skip
    WARPS: gl.constexpr = plan.worker_warps
    REGISTERS: gl.constexpr = plan.worker_registers
    # The first role is not in WARPS and REGISTERS: it has four warps, and what registers the others
    # leave. So it has to be a group of keys.
    gl.warp_specialize(
        join(
            [(compute_dkdv_dq_block64, (dq, dk, dv, sums_ptr, shared, queue, order, call, plan))]
            if ONE else
            [
                (compute_dkdv, (dk, dv, shared, queue, order, call, 0, plan)),
                (compute_dkdv, (dk, dv, shared, queue, order, call, 1, plan)),
                (compute_dq, (dq, sums_ptr, shared, queue, order, call, plan)),
            ]
            if plan.dq_group else
            [
                (compute_dkdv_dq, (dq, dk, dv, sums_ptr, shared, queue, order, call, 0, plan)),
                (compute_dkdv_dq, (dq, dk, dv, sums_ptr, shared, queue, order, call, 1, plan)),
            ],
            [
                (produce, (q, k, v, dout, row_stats, shared, queue, counter, order, call, plan)),
                (run_dq_semaphore, (flags_ptr, shared, queue, order, call, True, plan)),
                (run_dq_semaphore, (flags_ptr, shared, queue, order, call, False, plan)),
            ],
        ),
        WARPS, REGISTERS,
    )  # fmt: skip
