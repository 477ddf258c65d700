"""Launches of the Hopper backward pass: preprocess, the kernel itself, and the sum of splits."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...options import EMPTY_ROWS, AttentionOptions
from ...triton import bwd as portable
from ..launch import (
    Kernel,
    TensorMaps,
    as_int32,
    compile_kernel,
    current_stream,
    described,
    described_numbers,
    n_multiprocessors,
    numbers_type,
    pointer_type,
    tile_counters,
    tile_type,
)  # fmt: skip
from .dq import PANEL
from .kernel import attn_bwd_kernel
from .plan import BLOCK, KEYS, QUERIES, BackwardPlan, backward_plan, heads_together
from .preprocess import attn_bwd_preprocess_kernel
from .split_reduce import ROWS, attn_bwd_split_reduce_kernel


def compile_bwd(plan: BackwardPlan, dtype: torch.dtype) -> Any:
    """Compile the kernel for this plan and for q, k and v of this dtype; needs no GPU."""
    row_tile = tile_type(QUERIES, plan.block_d, dtype)
    key_tile = tile_type(plan.block, plan.block_d, dtype)
    types = [
        *(row_tile, key_tile, key_tile, row_tile, numbers_type(2 * QUERIES)),
        *(tile_type(QUERIES, PANEL.value, dtype), *[tile_type(KEYS, plan.block_d, dtype)] * 2),
        *("*fp32", "*i32", "*i32"),  # sums, flags and counter
        "*i64" if plan.features.dropout else None,
        "*i32" if plan.features.lengths else None,
        *["*i32" if plan.features.documents else None] * 3,
        *["*i32" if plan.has_block_list else None] * 2,
        "*fp32" if plan.has_block_list else None,  # splits
        *["i32"] * 5,
        *["fp32"] * 4,
        *["i32"] * 5,
    ]
    return compile_kernel(attn_bwd_kernel, types, plan, {types.index("*fp32"): 16})


def compile_preprocess(plan: BackwardPlan, dtype: torch.dtype, with_dlse: bool) -> Any:
    """The kernel that runs before it; needs no GPU."""
    tensor = pointer_type(dtype)
    types = [
        *(tensor, tensor, "*fp32", "*fp32" if with_dlse else None, "*fp32", "*i32"),
        *["i64"] * 6,  # strides
        *["i32"] * 4,
    ]
    divisors = {0: 16, 1: 16, **dict.fromkeys(range(6, 12), 8), 13: 8}
    return compile_kernel(attn_bwd_preprocess_kernel, types, plan, divisors)


def compile_split_reduce(plan: BackwardPlan, dtype: torch.dtype) -> Any:
    """The kernel that runs after it where columns are split; needs no GPU."""
    tensor = pointer_type(dtype)
    types = ["*fp32", "*i32", tensor, tensor, *["i64"] * 6, *["i32"] * 4]
    divisors = {0: 16, 2: 16, 3: 16, **dict.fromkeys(range(4, 10), 8), 11: 8}
    return compile_kernel(attn_bwd_split_reduce_kernel, types, plan, divisors)


@functools.cache
def _kernel(device: int, dtype: torch.dtype, plan: BackwardPlan) -> Kernel:
    return Kernel(compile_bwd(plan, dtype))


@functools.cache
def _preprocess_kernel(
    device: int, dtype: torch.dtype, plan: BackwardPlan, with_dlse: bool
) -> Kernel:
    return Kernel(compile_preprocess(plan, dtype, with_dlse))


@functools.cache
def _split_reduce_kernel(device: int, dtype: torch.dtype, plan: BackwardPlan) -> Kernel:
    return Kernel(compile_split_reduce(plan, dtype))


def attn_bwd(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    options: AttentionOptions, grads: Sequence[Tensor],
) -> None:  # fmt: skip
    """Launch the kernels of the backward pass, or the portable ones where there is no plan.

    Args:
        dout: (B, T_q, H, D) in the dtype of q; dlse: (B, H, T_q) fp32, or None.
        q, k, v, out, lse: as the forward pass took and returned them.
        grads: dq, dk and dv, written: of the shapes and dtype of q, k and v, and strides that the
            copy engine can take.
    """
    launches = {} if options.launches is None else options.launches
    if "backward" not in launches:
        plan = backward_plan(q.shape[-1], k.shape[1], options.features)
        launches["backward"] = (
            portable.attn_bwd if plan is None else BackwardLaunch(q, k, options, plan)
        )
    launches["backward"](dout, dlse, q, k, v, out, lse, options, grads)


class BackwardLaunch:
    """A launch prepared for calls that differ in their tensors only."""

    def __init__(self, q: Tensor, k: Tensor, options: AttentionOptions, plan: BackwardPlan) -> None:
        B, T_q, H, D = q.shape
        T_k, H_kv = k.shape[1:3]
        self._device, self._dtype, self._plan = q.device, q.dtype, plan
        self._n_keys = T_k
        self._kernel = _kernel(q.device.index, q.dtype, plan)
        n_row_tiles = -(-T_q // plan.block) * (plan.block // QUERIES)
        self._row_programs = B * H * n_row_tiles
        self._row_numbers = T_q, D, H, n_row_tiles
        walks, cuts = options.mask_walks, options.mask_cuts
        n_columns = -(-T_k // plan.block)
        n_tiles = n_columns if walks is None else walks.shape[1]
        # Numbers of 4 bytes in one allocation: sums of dq, lse and delta of rows, flags, splits.
        n_splits = 0 if cuts is None else n_tiles - n_columns + len(cuts)
        self._sizes = (
            B * H * n_row_tiles * QUERIES * plan.block_d,
            B * H * n_row_tiles * 2 * QUERIES,
            -(-B * H * n_row_tiles // 4) * 4,  # the splits begin at a multiple of 16 bytes
            n_splits * B * H_kv * 2 * plan.block * plan.block_d,
        )
        self._programs = min(plan.programs * n_multiprocessors(q.device), n_tiles * B * H_kv)
        self._numbers = (
            T_q, T_k, H, H // H_kv, options.window_size,
            options.softmax_scale, options.scale_log2, options.softcap_scale,
            options.keep_scale, as_int32(options.drop_threshold),
            n_tiles, B * H_kv, heads_together(T_q, H // H_kv, B * H_kv, plan),
            0 if walks is None or walks.shape[0] == 1 else walks.stride(0),
        )  # fmt: skip
        self._split_programs = 0
        if cuts is not None:
            self._split_programs = len(cuts) * B * H_kv * 2 * (plan.block // ROWS.value)
            self._split_kernel = _split_reduce_kernel(q.device.index, q.dtype, plan)
            self._split_numbers = T_k, D, H_kv, B * H_kv
        self._q_map, self._dq_map, self._out_map = (TensorMaps(QUERIES) for _ in range(3))
        self._k_map, self._v_map = (TensorMaps(plan.block) for _ in range(2))
        self._dk_map, self._dv_map = (TensorMaps(KEYS) for _ in range(2))

    def __call__(
        self, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
        lse: Tensor, options: AttentionOptions, grads: Sequence[Tensor],
    ) -> None:  # fmt: skip
        plan, device = self._plan, self._device
        dq, dk, dv = grads
        if options.mask_loops & EMPTY_ROWS:
            dq.zero_()  # where no key tile comes by
        if dlse is not None:
            dlse = dlse.contiguous()
        scratch = torch.empty(sum(self._sizes), dtype=torch.float32, device=device)
        n_sums, n_rows, n_flags, _ = self._sizes
        sums = scratch.data_ptr()
        rows = sums + 4 * n_sums
        flags = rows + 4 * n_rows
        splits = flags + 4 * n_flags
        stream = current_stream(device.index)
        q_map, q = self._q_map(q)
        k_map, k = self._k_map(k)
        v_map, v = self._v_map(v)
        dout_map, dout = described(dout if dout.stride(-1) == 1 else dout.contiguous(), QUERIES)
        _, out = self._out_map(out)
        _preprocess_kernel(device.index, self._dtype, plan, dlse is not None).launch(
            self._row_programs,
            stream,
            out.data_ptr(), dout.data_ptr(), lse.data_ptr(),
            *([] if dlse is None else [dlse.data_ptr()]),
            rows, flags,
            *out.stride()[:3], *dout.stride()[:3],
            *self._row_numbers,
        )  # fmt: skip
        tensors = [options.dropout_seed, options.kv_lengths]
        if options.doc_start is not None:
            tensors += [options.doc_start, *document_bounds(options.doc_start, self._n_keys)]
        tensors += [options.mask_walks, options.mask_visits]
        self._kernel.launch(
            self._programs,
            stream,
            q_map, k_map, v_map, dout_map, described_numbers(rows, n_rows, 2 * QUERIES),
            self._dq_map(dq)[0], self._dk_map(dk)[0], self._dv_map(dv)[0],
            sums, flags, tile_counters.pair(device, stream).data_ptr(),
            *[x.data_ptr() for x in tensors if x is not None],
            *([] if options.mask_walks is None else [splits if self._split_programs else sums]),
            *self._numbers,
        )  # fmt: skip
        if options.mask_cuts is not None:
            self._split_kernel.launch(
                self._split_programs,
                stream,
                splits, options.mask_cuts.data_ptr(), dk.data_ptr(), dv.data_ptr(),
                *dk.stride()[:3], *dv.stride()[:3],
                *self._split_numbers,
            )  # fmt: skip


def document_bounds(doc_start: Tensor, seq_k: int) -> tuple[Tensor, Tensor]:
    """Bounds for `kernels.hopper.backward.tiles`, right for any doc_start, increasing or not.

    Args:
        doc_start: (B, T_q) int32, the first position of each query's document.

    Returns:
        (B, blocks) int32, for each block the least start of its queries and of those after it; and
        (B, key tiles, 3) int32: how many of these are at or before the tile's last key, and for
        each half of the tile how many queries come before the first whose document begins after
        its first key.
    """
    lowest_after = doc_start.flip(1).cummin(dim=1).values.flip(1)
    blocks = lowest_after[:, ::BLOCK].contiguous()
    batch, device = doc_start.shape[0], doc_start.device
    n_tiles = -(-seq_k // BLOCK)
    first_key = torch.arange(0, n_tiles * BLOCK, KEYS, dtype=torch.int32, device=device)
    first_key = first_key.expand(batch, -1)
    last_key = (first_key[:, ::2] + (BLOCK - 1)).contiguous()
    visited = torch.searchsorted(blocks, last_key, right=True)
    highest_before = doc_start.cummax(dim=1).values
    whole = torch.searchsorted(highest_before, first_key.contiguous(), right=True)
    tiles = torch.cat((visited[..., None], whole.view(batch, n_tiles, 2)), dim=-1)
    return blocks, tiles.to(torch.int32)
