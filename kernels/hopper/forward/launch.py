"""Launch of the Hopper forward kernel."""

from typing import Any

import torch
from torch import Tensor

from ...options import AttentionOptions
from ...triton.tuning import mask_head_stride
from ..launch import (
    TensorMaps,
    compile_kernel,
    current_stream,
    kernel_on,
    n_multiprocessors,
    tile_counters,
    tile_type,
)  # fmt: skip
from .kernel import attn_fwd_kernel
from .plan import ROWS, SECTION_BYTES, Plan, forward_plan


def compile_fwd(plan: Plan, dtype: torch.dtype) -> Any:
    """Compile the kernel for this plan and for q, k and v of this dtype; needs no GPU."""
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
        "*fp32" if features.alibi else None,
        *["*i32" if plan.has_block_list else None] * 2,
        *["i32"] * 5,
        *["fp32"] * 3,
        *["i32"] * 6,
    ]
    return compile_kernel(attn_fwd_kernel, types, plan)


def attn_fwd(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Launch the forward kernel.

    Args:
        q: (B, T_q, H, D) fp16 or bf16, D up to 256; k, v: (B, T_k, H_kv, D). Strides and options
            as `kernels.hopper.unsupported_reason` requires.
        out: written, with such strides; None: a contiguous tensor is allocated.

    Returns:
        out (B, T_q, H, D) in the dtype of q and lse (B, H, T_q) fp32, natural logarithm.
    """
    launches = options.launches
    if launches is None:
        return ForwardLaunch(q, k, options)(q, k, v, options, out)
    if "forward" not in launches:
        launches["forward"] = ForwardLaunch(q, k, options)
    return launches["forward"](q, k, v, options, out)


class ForwardLaunch:
    """Prepared launch for calls that differ only in their tensors."""

    def __init__(self, q: Tensor, k: Tensor, options: AttentionOptions) -> None:
        B, T_q, H, D = q.shape
        T_k, H_kv = k.shape[1:3]
        plan = forward_plan(D, T_q, T_k, options.features)
        n_tiles = -(-T_q // (plan.groups * ROWS))
        # Heads whose keys and values fit in the L2 cache together. The query heads of a group share
        # keys and values.
        section = max(1, SECTION_BYTES // (4 * T_k * D)) * (H // H_kv)
        self._device = q.device
        self._lse_shape = B, H, T_q
        self._kernel = kernel_on(q.device.index, compile_fwd, plan, q.dtype)
        self._programs = min(n_multiprocessors(q.device), -(-n_tiles * B * H // plan.teams))
        self._q_map, self._out_map = TensorMaps(ROWS), TensorMaps(ROWS)
        self._k_map, self._v_map = TensorMaps(plan.block_n), TensorMaps(plan.block_n)
        self._numbers = (
            T_q, T_k, H, H // H_kv, options.window_size,
            options.scale_log2, options.softcap_scale,
            options.keep_scale, options.drop_threshold,
            n_tiles, B * H, min(section, B * H), mask_head_stride(options.mask_rows),
            options.first_query,
        )  # fmt: skip

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, out: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        device = self._device
        if out is None:
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = torch.empty(self._lse_shape, dtype=torch.float32, device=device)
        stream = current_stream(device.index)
        q_map, q = self._q_map(q)
        k_map, k = self._k_map(k)
        v_map, v = self._v_map(v)
        # In the order of the kernel: seed, documents, lengths, sinks, slopes, mask rows, blocks.
        tensors: tuple[Any, ...] = options[:7]
        self._kernel.launch(
            self._programs,
            stream,
            q_map, k_map, v_map, self._out_map(out)[0],
            lse.data_ptr(), tile_counters.pair(device, stream).data_ptr(),
            *[x.data_ptr() for x in tensors if x is not None],
            *self._numbers,
        )  # fmt: skip
        return out, lse
