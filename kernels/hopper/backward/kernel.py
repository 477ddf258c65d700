"""The backward pass for Hopper (H100, H200), in Gluon: docs/hopper.md tells how it works.

FlashAttention-2's backward (arXiv 2307.08691, Algorithm 2) in one kernel, so that scores and their
gradients are computed once: five matrix products a tile. One program runs on each multiprocessor
and takes key tiles until there are none. Two groups of four warps own 64 keys each, dk and dv of
which they keep; dq is added up from program to program, in turns, so a run repeats bit for bit.
Under a mask in blocks of 64 two programs run on each, and have one group.

Letters: B batch, T tokens, H heads, D head_dim; M queries of a row tile, N keys of a program.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import runtime
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ...options import AttentionOptions
from ...triton import bwd as portable
from ..launch import (
    Kernel,
    as_int32,
    compile_kernel,
    described,
    described_numbers,
    n_multiprocessors,
    numbers_type,
    pointer_type,
    tile_counters,
    tile_type,
)
from ..scheduler import Order, make_mailbox, make_numbers
from .dkdv import own_keys
from .dkdv_dq import own_keys_and_dq
from .dkdv_dq_block64 import own_block
from .documents import document_bounds
from .dq import PANEL, make_dq
from .plan import (
    KEYS,
    QUERIES,
    BackwardPlan,
    backward_plan,
    heads_together,
)
from .preprocess import attn_bwd_rows_kernel
from .producer import produce_rows
from .semaphores import Turns, carry_turns, make_turns
from .split_reduce import ROWS, attn_bwd_pieces_kernel
from .tiles import GROUP_N, WALK, Call, M


class Shared(NamedTuple):
    """Tiles in shared memory, and for each a barrier that it is full and one that it is empty."""

    q: gl.shared_memory_descriptor  # (stages, 1, 1, M, D)
    dout: gl.shared_memory_descriptor
    rows: gl.shared_memory_descriptor  # (stages, 2 * M): lse and delta
    k: gl.shared_memory_descriptor  # (kv_stages, 1, 1, N, D)
    v: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor  # (ds_stages, N, M)
    # (4 or 5, 1, 1, N / 2, D): dv, dk and dq on their way out. One group needs none: they leave
    # through what it no longer needs
    out: gl.shared_memory_descriptor | None
    # which row tile it is, where a list tells; else None
    row_tile: gl.shared_memory_descriptor | None  # (stages, 1)
    full: gl.shared_memory_descriptor  # q, dout and rows
    # of each group: Triton has all threads meet between two uses of the same barriers
    empty: tuple[gl.shared_memory_descriptor, ...]
    kv_full: gl.shared_memory_descriptor
    kv_empty: gl.shared_memory_descriptor
    ds_full: tuple[gl.shared_memory_descriptor, gl.shared_memory_descriptor] | None
    ds_empty: tuple[gl.shared_memory_descriptor, gl.shared_memory_descriptor] | None
    turns: Turns


@gluon.jit
def _barriers(n: gl.constexpr, count: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [n, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(n):
        mbarrier.init(barriers.index(i), count=count)
    return barriers


@gluon.jit
def attn_bwd_kernel(
    q,
    k,
    v,
    dout,
    rows,
    dq,
    dk,
    dv,
    sums_ptr,
    flags_ptr,
    counter,
    seed_ptr,
    lengths_ptr,
    doc_ptr,
    doc_blocks_ptr,
    doc_tiles_ptr,
    walks_ptr,
    visits_ptr,
    pieces_ptr,
    seq_q,
    seq_k,
    n_head,
    group,
    window_size,
    scale,
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
    D: gl.constexpr = plan.block_d
    N: gl.constexpr = plan.block
    STAGES: gl.constexpr = plan.stages
    KV: gl.constexpr = plan.kv_stages
    DS: gl.constexpr = plan.ds_stages
    # groups of keys, perhaps one of dq, and the two warps of turns
    READERS: gl.constexpr = plan.groups + (3 if plan.dq_group else 2)
    # dq leaves from a place of its own, or from where dv does
    OUT: gl.constexpr = 5 if plan.dq_group else 4
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, M], q.dtype)
    # tiles lie in shared memory as they are allocated: at 128 columns other orders are up to 8%
    # slower with the same machine code
    shared = Shared(
        gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, M, D], q.layout),
        gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, M, D], dout.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 2 * M], rows.layout),
        gl.allocate_shared_memory(q.dtype, [KV, 1, 1, N, D], k.layout),
        gl.allocate_shared_memory(q.dtype, [KV, 1, 1, N, D], v.layout),
        gl.allocate_shared_memory(q.dtype, [DS, N, M], ds_layout),
        None
        if plan.groups == 1
        else gl.allocate_shared_memory(q.dtype, [OUT, 1, 1, GROUP_N, D], dk.layout),
        make_numbers(STAGES) if plan.listed else None,
        _barriers(STAGES, 1),
        # the compiler gives the memory of barriers that nobody uses to others, which is not safe:
        # docs/hopper.md, What guards it
        (_barriers(STAGES, 1),)
        if plan.groups == 1
        else (_barriers(STAGES, 1), _barriers(STAGES, 1)),
        _barriers(KV, 1),
        _barriers(KV, 3 if plan.dq_group else plan.groups),
        None if plan.groups == 1 else (_barriers(DS, 1), _barriers(DS, 1)),
        (_barriers(DS, 1), _barriers(DS, 1)) if plan.dq_group else None,
        make_turns(1 if plan.dq_group else plan.groups, plan),
    )
    box = make_mailbox(READERS, WALK if plan.listed else 0)
    fence_async_shared()
    order = Order(n_tiles, n_heads, section)
    call = Call(
        seq_q, seq_k, n_head, group, window_size, scale, scale_log2, softcap_scale, keep_scale,
        threshold, seed_ptr, lengths_ptr, doc_ptr, doc_blocks_ptr, doc_tiles_ptr,
        walks_ptr, visits_ptr, pieces_ptr, mask_stride,
    )  # fmt: skip
    if plan.groups == 1:
        gl.warp_specialize(
            [
                (own_block, (dq, dk, dv, sums_ptr, shared, box, order, call, plan)),
                (produce_rows, (q, k, v, dout, rows, shared, box, counter, order, call, plan)),
                (carry_turns, (flags_ptr, shared, box, order, call, True, plan)),
                (carry_turns, (flags_ptr, shared, box, order, call, False, plan)),
            ],
            [1, 1, 1],
            [24, 24, 24],
        )
    elif plan.dq_group:
        gl.warp_specialize(
            [
                (own_keys, (dk, dv, shared, box, order, call, 0, plan)),
                (own_keys, (dk, dv, shared, box, order, call, 1, plan)),
                (make_dq, (dq, sums_ptr, shared, box, order, call, plan)),
                (produce_rows, (q, k, v, dout, rows, shared, box, counter, order, call, plan)),
                (carry_turns, (flags_ptr, shared, box, order, call, True, plan)),
                (carry_turns, (flags_ptr, shared, box, order, call, False, plan)),
            ],
            [4, 4, 1, 1, 1],
            [plan.key_registers, plan.dq_registers, 24, 24, 24],
        )
    else:
        gl.warp_specialize(
            [
                (own_keys_and_dq, (dq, dk, dv, sums_ptr, shared, box, order, call, 0, plan)),
                (own_keys_and_dq, (dq, dk, dv, sums_ptr, shared, box, order, call, 1, plan)),
                (produce_rows, (q, k, v, dout, rows, shared, box, counter, order, call, plan)),
                (carry_turns, (flags_ptr, shared, box, order, call, True, plan)),
                (carry_turns, (flags_ptr, shared, box, order, call, False, plan)),
            ],
            [4, 1, 1, 1],
            [plan.key_registers, 24, 24, 24],
        )


# ---- the launch


def compile_bwd(plan: BackwardPlan, dtype: torch.dtype) -> Any:
    """The kernel for this plan and for q, k and v of this dtype: this needs no GPU."""
    row_tile = tile_type(QUERIES, plan.block_d, dtype)
    key_tile = tile_type(plan.block, plan.block_d, dtype)
    types = [
        *(row_tile, key_tile, key_tile, row_tile, numbers_type(2 * QUERIES)),
        *(tile_type(QUERIES, PANEL.value, dtype), *[tile_type(KEYS, plan.block_d, dtype)] * 2),
        *("*fp32", "*i32", "*i32"),  # sums, flags and counter
        "*i64" if plan.features.dropout else None,
        "*i32" if plan.features.lengths else None,
        *["*i32" if plan.features.documents else None] * 3,
        *["*i32" if plan.listed else None] * 2,
        "*fp32" if plan.listed else None,  # pieces
        *["i32"] * 5,
        *["fp32"] * 4,
        *["i32"] * 5,
    ]
    return compile_kernel(attn_bwd_kernel, types, plan, {types.index("*fp32"): 16})


def compile_rows(plan: BackwardPlan, dtype: torch.dtype, with_dlse: bool) -> Any:
    """The kernel that runs before it."""
    tensor = pointer_type(dtype)
    types = [
        *(tensor, tensor, "*fp32", "*fp32" if with_dlse else None, "*fp32", "*i32"),
        *["i64"] * 6,  # strides
        *["i32"] * 4,
    ]
    divisors = {0: 16, 1: 16, **dict.fromkeys(range(6, 12), 8), 13: 8}
    return compile_kernel(attn_bwd_rows_kernel, types, plan, divisors)


def compile_pieces(plan: BackwardPlan, dtype: torch.dtype) -> Any:
    """The kernel that runs after it where columns are cut."""
    tensor = pointer_type(dtype)
    types = ["*fp32", "*i32", tensor, tensor, *["i64"] * 6, *["i32"] * 4]
    divisors = {0: 16, 2: 16, 3: 16, **dict.fromkeys(range(4, 10), 8), 11: 8}
    return compile_kernel(attn_bwd_pieces_kernel, types, plan, divisors)


@functools.cache
def _kernel(device: int, dtype: torch.dtype, plan: BackwardPlan) -> Kernel:
    return Kernel(compile_bwd(plan, dtype))


@functools.cache
def _rows_kernel(device: int, dtype: torch.dtype, plan: BackwardPlan, with_dlse: bool) -> Kernel:
    return Kernel(compile_rows(plan, dtype, with_dlse))


@functools.cache
def _pieces_kernel(device: int, dtype: torch.dtype, plan: BackwardPlan) -> Kernel:
    return Kernel(compile_pieces(plan, dtype))


def attn_bwd(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    options: AttentionOptions,
    grads: Sequence[Tensor],
) -> None:
    """Launch the kernels of the backward pass, or those of `kernels.triton.bwd` for a call that
    `backward_plan` has no plan for.

    Args:
        dout: (B, T_q, H, D) in the dtype of q; dlse: (B, H, T_q) fp32, or None.
        q, k, v, out, lse: as `kernels.hopper.forward.kernel.attn_fwd` took and gave them.
        grads: dq, dk and dv, written: of the shapes and dtype of q, k and v, and strides that the
            copy engine can take.
    """
    device, dtype = q.device, q.dtype
    B, T_q, H, D = q.shape
    T_k, H_kv = k.shape[1:3]
    plan = backward_plan(D, T_k, options.features)
    if plan is None:
        return portable.attn_bwd(dout, dlse, q, k, v, out, lse, options, grads)
    n_row_tiles = -(-T_q // plan.block) * (plan.block // QUERIES)
    dq, dk, dv = grads
    if options.features.empty_rows:
        dq.zero_()  # where no key tile comes by
    numbers = functools.partial(torch.empty, device=device)
    sums = numbers(B * H * n_row_tiles * QUERIES * plan.block_d, dtype=torch.float32)
    rows = numbers(B * H * n_row_tiles * 2 * QUERIES, dtype=torch.float32)
    flags = numbers(B * H * n_row_tiles, dtype=torch.int32)
    if dlse is not None:
        dlse = dlse.contiguous()
    stream = runtime.driver.active.get_current_stream(device.index)
    q_map, q = described(q, QUERIES)
    k_map, k = described(k, plan.block)
    v_map, v = described(v, plan.block)
    dout_map, dout = described(dout, QUERIES)
    _, out = described(out, QUERIES)
    _rows_kernel(device.index, dtype, plan, dlse is not None).launch(
        B * H * n_row_tiles,
        stream,
        out.data_ptr(), dout.data_ptr(), lse.data_ptr(),
        *([] if dlse is None else [dlse.data_ptr()]),
        rows.data_ptr(), flags.data_ptr(),
        *out.stride()[:3], *dout.stride()[:3],
        T_q, D, H, n_row_tiles,
    )  # fmt: skip
    walks, cuts = options.mask_walks, options.mask_cuts
    n_columns = -(-T_k // plan.block)
    n_tiles = n_columns if walks is None else walks.shape[1]
    pieces = sums  # not written
    if cuts is not None:
        n_pieces = n_tiles - n_columns + len(cuts)
        pieces = numbers(n_pieces * B * H_kv * 2 * plan.block * plan.block_d, dtype=torch.float32)
    of_documents = (
        () if options.doc_start is None
        else (options.doc_start, *document_bounds(options.doc_start, T_k))
    )  # fmt: skip
    tensors = (
        sums, flags, tile_counters.pair(device, stream),
        options.dropout_seed, options.kv_lengths, *of_documents,
        walks, options.mask_visits, None if walks is None else pieces,
    )  # fmt: skip
    _kernel(device.index, dtype, plan).launch(
        min(plan.programs * n_multiprocessors(device), n_tiles * B * H_kv),
        stream,
        q_map, k_map, v_map, dout_map, described_numbers(rows, 2 * QUERIES),
        described(dq, QUERIES)[0], described(dk, KEYS)[0], described(dv, KEYS)[0],
        *[x.data_ptr() for x in tensors if x is not None],
        T_q, T_k, H, H // H_kv, options.window_size,
        options.softmax_scale, options.scale_log2, options.softcap_scale,
        options.keep_scale, as_int32(options.drop_threshold),
        n_tiles, B * H_kv, heads_together(T_q, H // H_kv, B * H_kv, plan),
        0 if walks is None or walks.shape[0] == 1 else walks.stride(0),
    )  # fmt: skip
    if cuts is not None:
        _pieces_kernel(device.index, dtype, plan).launch(
            len(cuts) * B * H_kv * 2 * (plan.block // ROWS.value),
            stream,
            pieces.data_ptr(), cuts.data_ptr(), dk.data_ptr(), dv.data_ptr(),
            *dk.stride()[:3], *dv.stride()[:3],
            T_k, D, H_kv, B * H_kv,
        )  # fmt: skip
