"""Launch parameters of the kernels: tile sizes, and the arguments that all of them share."""

import functools
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from ..options import UNMASKED_LOOP, AttentionOptions, Features
from .tiles import FP32, MAX_BLOCK, SHORT, TABLES, Tiles


def forward_tiles(q: Tensor, k: Tensor, options: AttentionOptions) -> Tiles:
    """Tiles of the forward kernel for q (B, T_q, H, D) and k (B, T_k, H_kv, D)."""
    exceptions = _short(q, k, options) + (("hopper, causal",) if options.causal else ())
    return _tiles("forward", exceptions, q, options)


def backward_dq_tiles(q: Tensor, k: Tensor, options: AttentionOptions) -> Tiles:
    """Tiles of the dq kernel, whose programs own block_m queries and loop over keys."""
    return _tiles("backward_dq", _short(q, k, options), q, options)


def backward_dkdv_tiles(q: Tensor, k: Tensor, options: AttentionOptions) -> Tiles:
    """Tiles of the dk, dv kernel, whose programs own block_n keys and loop over queries."""
    # A cap and grouped heads need registers even where a mask leaves one loop, so they come first.
    exceptions = ()
    if options.softcap_scale > 0.0 or q.shape[2] > k.shape[2]:
        exceptions = ("hopper, small",)
    elif options.mask_block_size > 0 and options.mask_loops == UNMASKED_LOOP:
        exceptions = ("hopper, whole",)
    elif options.mask_block_size > 0 or options.dropout_p > 0.0:
        exceptions = ("hopper, small",)
    return _tiles("backward_dkdv", exceptions, q, options)


def _short(q: Tensor, k: Tensor, options: AttentionOptions) -> tuple[str, ...]:
    return ("hopper, short",) if keys_per_query(q, k, options) <= SHORT else ()


def keys_per_query(q: Tensor, k: Tensor, options: AttentionOptions) -> float:
    """Estimate how many keys a query sees, on average, without reading a tensor.

    Documents and padding are ignored, and blocks of a mask count in full.
    """
    if options.mask_rows is not None and options.mask_row_blocks is not None:
        n_head, n_rows, _ = options.mask_rows.shape
        return options.mask_row_blocks.numel() * options.mask_block_size / (n_head * n_rows)
    seq_q, seq_k = q.shape[1], k.shape[1]
    # Under a causal mask, queries see from T_k - T_q + 1 to T_k keys; if T_q > T_k, average over
    # the queries that see any.
    keys = max(seq_k - seq_q / 2, seq_k / 2) if options.causal else seq_k
    if options.window_size > 0:
        keys = min(keys, options.window_size * (1 if options.causal else 2))
    return keys


def _tiles(kernel: str, exceptions: tuple[str, ...], q: Tensor, options: AttentionOptions) -> Tiles:
    is_fp32 = q.dtype == torch.float32
    return _choose(kernel, exceptions, q.shape[-1], is_fp32, q.device, options.mask_block_size)


@functools.cache  # takes microseconds of CPU time, dozens of times per training step
def _choose(
    kernel: str, exceptions: tuple[str, ...], head_dim: int, is_fp32: bool, device: torch.device,
    mask_block_size: int,
) -> Tiles:  # fmt: skip
    """Tiles measured on this GPU, or those of the tables, limited to the blocks of a mask."""
    # Tensor cores take no inner dimension below 16, and tiles have powers of two: pad the rest.
    block_d = max(16, triton.next_power_of_2(head_dim))
    tables = TABLES[kernel]
    if is_fp32:
        tiles = FP32[block_d]
    elif device.type != "cuda":
        tiles = tables["portable"][block_d]
    elif measured := measured_tiles(torch.cuda.get_device_name(device))[kernel].get(block_d):
        tiles = measured
    elif torch.cuda.get_device_capability(device)[0] == 9:
        names = (*exceptions, "hopper")
        tiles = next(tables[name][block_d] for name in names if block_d in tables.get(name, {}))
    else:
        tiles = tables["portable"][block_d]
    # Under a mask, a tile must not reach beyond its block.
    largest = mask_block_size or MAX_BLOCK
    return replace(
        tiles, block_m=min(tiles.block_m, largest), block_n=min(tiles.block_n, largest),
        block_n_masked=min(tiles.block_n_masked or tiles.block_n, largest), block_d=block_d,
    )  # fmt: skip


_MAX_FILE_BYTES = 1 << 20  # of the file of measured tiles


def use_measured_tiles(kernel: str, gpu_name: str, head_dim: int, tiles: Tiles | None) -> None:
    """Use `tiles` for a kernel and padded head dimension from now on; None restores the tables.

    This changes the process only; `scripts.tune_attention` stores them in `measured_tiles_file`.
    """
    measured = measured_tiles(gpu_name)[kernel]
    measured.pop(head_dim, None)
    if tiles is not None:
        measured[head_dim] = tiles
    _choose.cache_clear()


def measured_tiles_file(gpu_name: str) -> Path:
    """Path of the tiles that `scripts.tune_attention` measured on a GPU with this Triton version.

    It is in $PAPILIO_CACHE, or in ~/.cache/papilio.
    """
    folder = Path(os.environ.get("PAPILIO_CACHE", "~/.cache/papilio")).expanduser()
    return folder / f"tiles-{gpu_name.replace(' ', '-')}-triton-{triton.__version__}.json"


@functools.cache
def measured_tiles(gpu_name: str) -> dict[str, dict[int, Tiles]]:
    """Tiles by kernel and padded head dimension, from `measured_tiles_file`, read once.

    Raises:
        ValueError: the file is damaged.
    """
    file = measured_tiles_file(gpu_name)
    if not file.exists():
        return {kernel: {} for kernel in TABLES}
    try:
        # Reading a pipe would block, and a large file cannot be one of ours.
        if not file.is_file() or file.stat().st_size > _MAX_FILE_BYTES:
            raise ValueError("it is not a file of a few lines")
        tables = json.loads(file.read_text())
        return {name: {int(d): Tiles(**t) for d, t in tables[name].items()} for name in TABLES}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{file} is not what scripts.tune_attention writes ({error}): delete it, or measure "
            "again"
        ) from error


def tiles_per_head(seq_len: int, block: int, options: AttentionOptions) -> int:
    """Number of programs for a head, one per tile; under a mask, with the tiles of whole blocks."""
    rows = max(block, options.mask_block_size)
    return triton.cdiv(seq_len, rows) * (rows // block)


def mask_head_stride(entries: Tensor | None) -> int:
    """Stride of heads in `MaskLists.rows`, `.cols` or `.col_ranges`; 0 if heads share a layout."""
    return 0 if entries is None or entries.shape[0] == 1 else entries.stride(0)


def launch_options(q: Tensor, k: Tensor, options: AttentionOptions) -> dict[str, Any]:
    """Arguments that the forward kernel and both backward kernels share."""
    return {
        "seq_q": q.shape[1], "seq_k": k.shape[1], "window_size": options.window_size,
        "scale_log2": options.scale_log2, "softcap_scale": options.softcap_scale,
        "keep_scale": options.keep_scale, "threshold": options.drop_threshold,
        "first_query": options.first_query,
        "GROUP": q.shape[2] // k.shape[2], "HEAD_DIM": q.shape[3],
        "features": compiled_features(q, k, options), "PRECISION": _dot_precision(q.dtype),
    }  # fmt: skip


def compiled_features(q: Tensor, k: Tensor, options: AttentionOptions) -> Features:
    """Compile-time features of a call: its options, and whether any tile needs a mask.

    No tile does if every query sees every key and all tiles are whole. The masked loop is then left
    out, which frees registers for the other loop.
    """
    features = options.features
    some_hidden = features.causal or features.window or features.documents or features.lengths
    whole_tiles = q.shape[1] % MAX_BLOCK == 0 and k.shape[1] % MAX_BLOCK == 0
    if some_hidden or features.mask_block_size > 0 or not whole_tiles:
        return features
    return replace(features, masked_loop=False)


def _dot_precision(dtype: torch.dtype) -> str:
    """Precision of fp32 matrix products, as `torch.set_float32_matmul_precision` sets it."""
    if dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest":
        return "ieee"
    return "tf32"
