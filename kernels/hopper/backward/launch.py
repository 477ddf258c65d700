"""Launches of the Hopper backward pass: preprocess, the kernel itself, and the sum of splits."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...options import EMPTY_ROWS, AttentionOptions
from ...triton import bwd as portable
from ...triton.document_bounds import TOGETHER, document_bounds_kernel
from ...triton.tuning import mask_head_stride
from ..launch import (
    Kernel,
    TensorMaps,
    compile_kernel,
    current_stream,
    kernel_on,
    n_multiprocessors,
    pointer_type,
    tile_counters,
    tile_map,
    tile_type,
    vector_map,
    vector_type,
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
        *(row_tile, key_tile, key_tile, row_tile, vector_type(2 * QUERIES)),
        *(tile_type(QUERIES, PANEL.value, dtype), *[tile_type(KEYS, plan.block_d, dtype)] * 2),
        *("*fp32", "*i32", "*i32"),  # sums, flags and counter
        "*i64" if plan.features.dropout else None,
        "*i32" if plan.features.lengths else None,
        *["*i32" if plan.features.documents else None] * 3,
        "*fp32" if plan.features.alibi else None,
        *["*i32" if plan.has_block_list else None] * 2,
        "*fp32" if plan.has_block_list else None,  # splits
        *["i32"] * 5,
        *["fp32"] * 4,
        *["i32"] * 6,
    ]
    return compile_kernel(attn_bwd_kernel, types, plan, {types.index("*fp32"): 16})


def compile_preprocess(plan: BackwardPlan, dtype: torch.dtype, with_dlse: bool) -> Any:
    """Compile the kernel that runs before it; needs no GPU."""
    tensor = pointer_type(dtype)
    types = [
        *(tensor, tensor, "*fp32", "*fp32" if with_dlse else None, "*fp32", "*i32"),
        *["i64"] * 6,  # strides
        *["i32"] * 4,
    ]
    divisors = {0: 16, 1: 16, **dict.fromkeys(range(6, 12), 8), 13: 8}
    return compile_kernel(attn_bwd_preprocess_kernel, types, plan, divisors)


def compile_split_reduce(plan: BackwardPlan, dtype: torch.dtype) -> Any:
    """Compile the kernel that runs after it if columns are split; needs no GPU."""
    tensor = pointer_type(dtype)
    types = ["*fp32", "*i32", tensor, tensor, *["i64"] * 6, *["i32"] * 4]
    divisors = {0: 16, 2: 16, 3: 16, **dict.fromkeys(range(4, 10), 8), 11: 8}
    return compile_kernel(attn_bwd_split_reduce_kernel, types, plan, divisors)


def compile_document_bounds() -> Any:
    """Compile the kernel that finds the bounds of documents; needs no GPU."""
    types = ["*i32"] * 3 + ["i32"] * 3
    return compile_kernel(document_bounds_kernel, types, KEYS, options={"enable_fp_fusion": True})


def attn_bwd(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    options: AttentionOptions, grads: Sequence[Tensor],
) -> None:  # fmt: skip
    """Launch the kernels of the backward pass, or the portable ones if there is no plan.

    Args:
        dout: (B, T_q, H, D) in the dtype of q; dlse: (B, H, T_q) fp32, or None.
        q, k, v, out, lse: as the forward pass took and returned them.
        grads: dq, dk and dv, which are written. They have the shapes and dtype of q, k and v, and
            strides that the copy engine can take.
    """
    launches = {} if options.launches is None else options.launches
    if "backward" not in launches:
        plan = backward_plan(q.shape[-1], k.shape[1], options.features)
        launches["backward"] = (
            portable.attn_bwd if plan is None else BackwardLaunch(q, k, options, plan)
        )
    launches["backward"](dout, dlse, q, k, v, out, lse, options, grads)


class BackwardLaunch:
    """Prepared launches for calls that differ only in their tensors."""

    def __init__(self, q: Tensor, k: Tensor, options: AttentionOptions, plan: BackwardPlan) -> None:
        B, T_q, H, D = q.shape
        T_k, H_kv = k.shape[1:3]
        self._device, self._dtype, self._plan = q.device, q.dtype, plan
        self._kernel = kernel_on(q.device.index, compile_bwd, plan, q.dtype)
        self._preprocess: dict[bool, Kernel] = {}  # keyed by whether lse has a gradient
        n_row_tiles = -(-T_q // plan.block) * (plan.block // QUERIES)
        self._preprocess_programs = B * H * n_row_tiles
        self._preprocess_numbers = T_q, D, H, n_row_tiles
        col_ranges, cuts = options.mask_col_ranges, options.mask_cuts
        n_columns = -(-T_k // plan.block)
        n_tiles = n_columns if col_ranges is None else col_ranges.shape[1]
        # Scratch memory in one allocation, as 4-byte numbers: sums of dq, row statistics (lse and
        # delta), flags, splits, document bounds of key tiles, document bounds of query blocks.
        n_doc_tiles = n_doc_blocks = 0
        if options.doc_start is not None:
            n_doc_tiles, n_doc_blocks = -(-T_k // BLOCK) * (BLOCK // KEYS), -(-T_q // BLOCK)
            self._doc_kernel = kernel_on(q.device.index, compile_document_bounds)
            self._doc_programs = B * -(-max(n_doc_tiles, n_doc_blocks) // TOGETHER.value)
            self._doc_numbers = T_q, n_doc_tiles, n_doc_blocks
        n_splits = 0 if cuts is None else n_tiles - n_columns + len(cuts)
        sizes = [
            B * H * n_row_tiles * QUERIES * plan.block_d,
            B * H * n_row_tiles * 2 * QUERIES,
            -(-B * H * n_row_tiles // 4) * 4,  # so that splits begin at a multiple of 16 bytes
            n_splits * B * H_kv * 2 * plan.block * plan.block_d,
            B * n_doc_tiles * 2,
            B * n_doc_blocks,
        ]
        self._n_scratch, self._n_row_stats = sum(sizes), sizes[1]
        self._offsets = [4 * x for x in itertools.accumulate(sizes[:-1], initial=0)]
        self._programs = min(plan.programs * n_multiprocessors(q.device), n_tiles * B * H_kv)
        self._numbers = (
            T_q, T_k, H, H // H_kv, options.window_size,
            options.softmax_scale, options.scale_log2, options.softcap_scale,
            options.keep_scale, options.drop_threshold,
            n_tiles, B * H_kv, heads_together(T_q, H // H_kv, B * H_kv, plan),
            mask_head_stride(col_ranges), options.first_query,
        )  # fmt: skip
        self._split_programs = 0
        if cuts is not None:
            self._split_programs = len(cuts) * B * H_kv * 2 * (plan.block // ROWS.value)
            self._split_kernel = kernel_on(q.device.index, compile_split_reduce, plan, q.dtype)
            self._split_numbers = T_k, D, H_kv, B * H_kv
        self._q_map, self._dq_map, self._out_map = (TensorMaps(QUERIES) for _ in range(3))
        self._k_map, self._v_map = (TensorMaps(plan.block) for _ in range(2))
        self._dk_map, self._dv_map = (TensorMaps(KEYS) for _ in range(2))

    def _preprocess_kernel(self, with_dlse: bool) -> Kernel:
        if with_dlse not in self._preprocess:
            self._preprocess[with_dlse] = kernel_on(
                self._device.index, compile_preprocess, self._plan, self._dtype, with_dlse
            )
        return self._preprocess[with_dlse]

    def __call__(
        self, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
        lse: Tensor, options: AttentionOptions, grads: Sequence[Tensor],
    ) -> None:  # fmt: skip
        device = self._device
        dq, dk, dv = grads
        if options.mask_loops & EMPTY_ROWS:
            dq.zero_()  # no key tile visits the empty rows
        if dlse is not None:
            dlse = dlse.contiguous()
        scratch = torch.empty(self._n_scratch, dtype=torch.float32, device=device)
        start = scratch.data_ptr()
        sums, row_stats, flags, splits, doc_tiles, doc_blocks = [start + x for x in self._offsets]
        stream = current_stream(device.index)
        q_map, q = self._q_map(q)
        k_map, k = self._k_map(k)
        v_map, v = self._v_map(v)
        dout_map, dout = tile_map(dout if dout.stride(-1) == 1 else dout.contiguous(), QUERIES)
        # The map of out is not used, but out is then aligned as the preprocess kernel requires.
        _, out = self._out_map(out)
        self._preprocess_kernel(dlse is not None).launch(
            self._preprocess_programs,
            stream,
            out.data_ptr(), dout.data_ptr(), lse.data_ptr(),
            *([] if dlse is None else [dlse.data_ptr()]),
            row_stats, flags,
            *out.stride()[:3], *dout.stride()[:3],
            *self._preprocess_numbers,
        )  # fmt: skip
        documents = []
        if options.doc_start is not None:
            documents = [options.doc_start.data_ptr(), doc_tiles, doc_blocks]
            self._doc_kernel.launch(self._doc_programs, stream, *documents, *self._doc_numbers)
        ranges = options.mask_col_ranges
        slopes_and_lists = options.alibi_slopes, ranges, options.mask_visits
        seed_and_lengths: tuple[Any, ...] = options.dropout_seed, options.kv_lengths
        self._kernel.launch(
            self._programs,
            stream,
            q_map, k_map, v_map, dout_map,
            vector_map(row_stats, self._n_row_stats, 2 * QUERIES),
            self._dq_map(dq)[0], self._dk_map(dk)[0], self._dv_map(dv)[0],
            sums, flags, tile_counters.pair(device, stream).data_ptr(),
            *[x.data_ptr() for x in seed_and_lengths if x is not None],
            *documents,
            *[x.data_ptr() for x in slopes_and_lists if x is not None],
            *([] if ranges is None else [splits if self._split_programs else sums]),
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
