"""Autocast with cached casts of weights, and deterministic algorithms."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from kernels.fused.cast_cache import CastCache, active_cast_cache
from training.config import Dtype


@contextmanager
def autocast(dtype: Dtype, device: torch.device, *, cache_casts: bool = True) -> Iterator[None]:
    """Context for forward passes with activations and matrix multiplications in `dtype`.

    With `cache_casts`, PyTorch and `kernels.fused.cast_cache` cast each weight at most once per
    context; weights must then not move in memory. A cache that is already active is reused.
    """
    if dtype == "float32":
        yield
        return
    casts = CastCache().activate() if cache_casts and not active_cast_cache() else nullcontext()
    with casts, torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=cache_casts):
        yield


@contextmanager
def deterministic_algorithms(on: bool) -> Iterator[None]:
    """Context in which PyTorch must use deterministic algorithms, if `on`.

    Papilio's kernels are always deterministic. Otherwise results vary mainly in the gradient of the
    embedding, which torch.compile accumulates with atomics, and in the backward pass of SDPA.
    """
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(on)
    if on:
        # cuBLAS is deterministic with a fixed workspace (torch's default on Hopper anyway).
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # This project never reads uninitialized memory, and filling it would take time.
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
