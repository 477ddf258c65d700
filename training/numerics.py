"""How numbers are rounded: the dtype of activations, and whether equal work gives equal bits."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from kernels.fused.cast_cache import CastCache, active_cast_cache
from training.config import Dtype


@contextmanager
def autocast(dtype: Dtype, device: torch.device, *, cache_casts: bool = True) -> Iterator[None]:
    """The context for forward passes whose activations and matrix products are in `dtype`.

    With `cache_casts`, each weight is cast at most once within it, by PyTorch and by
    `kernels.fused.cast_cache`: weights must then stay where they are. An active cache is used.
    """
    if dtype == "float32":
        yield
        return
    casts = CastCache().activate() if cache_casts and not active_cast_cache() else nullcontext()
    with casts, torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=cache_casts):
        yield


@contextmanager
def deterministic_algorithms(on: bool) -> Iterator[None]:
    """Whether PyTorch must take algorithms that repeat bit for bit, in what is run within.

    The kernels of this project always repeat; what varies otherwise is, above all, the gradient of
    the embedding, which torch.compile adds up with atomics, and the backward pass of SDPA.
    """
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(on)
    if on:
        # cuBLAS repeats with a workspace of its own (what torch gives it on Hopper anyway).
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # Uninitialised memory is never read here, and filling it would take time.
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
