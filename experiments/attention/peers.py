"""Contenders of experiments.attention.

A contender is a function of q, k and v, (B, T, H, D) each, that returns out of the same shape. All
contenders of a case get the same tensors, except those in TENSORS. Both passes of those in SETTINGS
run under a setting of PyTorch.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from experiments.attention import approximate
from experiments.attention.cases import (
    DROPOUT_SEED,
    Attention,
    Case,
    Tensors,
    UnsupportedError,
)
from experiments.harness import load_module
from kernels import flash_attention
from kernels.for_torch import register_with_torch, unregister_with_torch

TUTORIAL = "Triton tutorial"
PORTABLE = "ours, portable"  # the kernels for GPUs other than Hopper


def versions(packages: Sequence[str]) -> dict[str, str | None]:
    """Versions of cuDNN and of the `packages` behind the peers; None if missing."""
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    numbers = None if cudnn is None else (cudnn // 10_000, cudnn // 100 % 100, cudnn % 100)
    result: dict[str, str | None] = {"cuDNN": numbers and ".".join(map(str, numbers))}
    for name in packages:
        try:
            result[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            result[name] = None
    return result


def heads_first(attend: Callable[..., Tensor]) -> Attention:
    """Wrap a function of tensors (B, H, T, D), which it gets as views."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)

    return attention


def ours(impl: str | None, case: Case, device: torch.device) -> Attention:
    """Papilio's attention: the default kernels (None), or an `impl` of `flash_attention`.

    "eager" is plain PyTorch, Algorithm 0 of the paper, and takes no dropout seed.
    """
    options: dict[str, Any] = {"causal": case.causal, "dropout_p": case.dropout_p}
    if case.sparsity is not None:
        options["mask"] = case.sparsity.mask(case.seq_len, device)
    if case.padded:
        options["kv_lengths"] = case.kv_lengths(device)
    if case.document is not None:
        begin = torch.arange(case.seq_len, device=device) // case.document * case.document
        options["doc_start"] = begin.int().expand(case.batch, -1).contiguous()
    if case.dropout_p > 0 and impl != "eager":
        options["dropout_seed"] = torch.tensor([DROPOUT_SEED], device=device)
    return partial(flash_attention, impl=impl, **options)


def sdpa(backend: SDPBackend | None, case: Case, device: torch.device) -> Attention:
    """PyTorch's scaled_dot_product_attention on one backend; None: PyTorch chooses.

    Selecting a backend takes 60 us of CPU time per call.
    """
    options: dict[str, Any] = {"is_causal": case.causal, "dropout_p": case.dropout_p}
    if case.padded:  # (B, 1, 1, T) bool, True for keys
        keys = torch.arange(case.seq_len, device=device)
        options["attn_mask"] = (keys < case.kv_lengths(device).unsqueeze(1))[:, None, None]
    attend = heads_first(partial(F.scaled_dot_product_attention, **options))
    if backend is None:
        return attend

    def attend_on_backend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        try:
            with sdpa_kernel(backend):
                return attend(q, k, v)
        except RuntimeError as error:
            # PyTorch's messages on a GPU and on a CPU.
            if not any(x in str(error) for x in ("No available kernel", "No viable backend")):
                raise
            raise UnsupportedError("PyTorch has no kernel for this case") from error

    return attend_on_backend


@contextmanager
def registered() -> Iterator[None]:
    """Run PyTorch's flash attention on Papilio's kernels."""
    register_with_torch()
    try:
        yield
    finally:
        unregister_with_torch()


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Have PyTorch use only algorithms that repeat bit for bit, or refuse the call."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    fills = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # it would cost time, and changes no result
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warns)
        memory.fill_uninitialized_memory = fills


def flex(backend: str, case: Case, device: torch.device) -> Attention:
    """PyTorch's compiled FlexAttention, with a block mask unless attention is dense.

    `backend` is AUTO, PyTorch's choice, or FLASH, which is flash-attn-4.
    """
    T, document, mask = case.seq_len, case.document or case.seq_len, None

    def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j

    def causal_in_document(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (i // document == j // document)

    if case.sparsity is not None:
        mask = case.sparsity.mask(T, device).to_flex(T, T, causal=case.causal)
        if case.causal:
            # Compiled code calls it for listed blocks only, so it need not check the layout.
            mask.mask_mod = causal
    elif case.causal:
        mask_mod = causal if case.document is None else causal_in_document
        mask = create_block_mask(mask_mod, None, None, T, T, device=str(device))
    # Reset, because after a few recompilations PyTorch would run it uncompiled. The backward of one
    # saved forward runs many times here, so it must not donate its buffers.
    torch._dynamo.reset()
    functorch_config.donated_buffer = False
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=False)
    return heads_first(partial(compiled, block_mask=mask, kernel_options={"BACKEND": backend}))


def flash_attn_4(repeats: bool, case: Case, device: torch.device) -> Attention:
    """The package flash-attn-4 (CuTe), if it is installed; `repeats` asks for repeatable bits."""
    try:
        from flash_attn import cute  # pyright: ignore[reportMissingImports]
        from flash_attn.cute import block_sparsity  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UnsupportedError(f"cannot be imported ({error})") from error
    T, call = case.seq_len, cute.flash_attn_func
    options: dict[str, Any] = {"softmax_scale": case.head_dim**-0.5, "deterministic": repeats}
    if case.sparsity is None:
        options["causal"] = case.causal
    else:
        lists = case.sparsity.mask(T, device).to_flex(T, T, causal=case.causal)
        if case.causal:
            options["mask_mod"] = cute_diagonal()
        options["block_sparse_tensors"] = block_sparsity.BlockSparseTensorsTorch(
            lists.kv_num_blocks, lists.kv_indices, lists.full_kv_num_blocks, lists.full_kv_indices,
            block_size=lists.BLOCK_SIZE,
        )  # fmt: skip
        order = {}
        if repeats:
            orders = block_sparsity.compute_dq_write_order_from_block_mask(lists)
            order = {"dq_write_order": orders[0], "dq_write_order_full": orders[1], "spt": False}
        options["block_sparse_tensors_bwd"] = block_sparsity.BlockSparseTensorsTorch(
            lists.q_num_blocks, lists.q_indices, lists.full_q_num_blocks, lists.full_q_indices,
            block_size=lists.BLOCK_SIZE, **order,
        )  # fmt: skip
    if case.document is not None:
        call = cute.flash_attn_varlen_func
        begins = torch.arange(0, T + 1, case.document, dtype=torch.int32, device=device)
        options |= {"cu_seqlens_q": begins, "cu_seqlens_k": begins}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if case.document is not None:  # the varlen call takes no batch dimension
            q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        result = call(q, k, v, **options)
        result = result[0] if isinstance(result, tuple) else result
        return result.view(case.batch, T, case.n_head, -1)

    return attend


def cute_diagonal() -> Callable[..., Any]:
    """Causal mask for partial blocks of flash-attn-4: its `causal` does not support block lists."""
    from cutlass import cute  # pyright: ignore[reportMissingImports]

    @cute.jit
    def is_visible(batch, head, query, key, seqlen_info, aux_tensors):
        return key <= query

    return is_visible


def load_tutorial(file: Path) -> ModuleType:
    """Import Triton's tutorial 06-fused-attention.py as a module.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is not that tutorial.
    """
    advice = "use Triton's 06-fused-attention.py of the installed version"
    if not file.is_file():
        raise FileNotFoundError(f"--tutorial={file} is not a file: {advice}")
    if file.suffix != ".py":
        raise ValueError(f"--tutorial={file} is not a Python file: {advice}")
    module = load_module("triton_tutorial", file)
    if not hasattr(module, "attention") or not hasattr(module, "_attn_fwd"):
        raise ValueError(f"--tutorial={file} has no attention or no _attn_fwd: {advice}")
    return module


def tutorial_tensors(tensors: Tensors) -> Tensors:
    """Copy tensors to fp16 in the layout (B, H, T, D); returns views of (B, T, H, D)."""
    q, k, v, dout = (x.detach().transpose(1, 2).contiguous().half() for x in tensors)
    q, k, v, dout = (x.transpose(1, 2) for x in (q, k, v, dout))
    return Tensors(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout)


def triton_tutorial(tutorial: ModuleType, case: Case, device: torch.device) -> Attention:
    """Triton's tutorial on fused attention, from `load_tutorial`, on `tutorial_tensors`.

    It gets the same values in fp16 and in its own layout, because it supports no other.
    """
    if case.sparsity or case.dropout_p > 0 or case.padded or case.document:
        raise UnsupportedError("the tutorial has no sparse mask, dropout, padding or documents")
    if case.seq_len % 128 != 0:
        raise UnsupportedError("the tutorial takes multiples of 128 tokens")
    # Its autotuner is keyed by length and head_dim, but not by `causal`. Clear its cache, or the
    # choice for one mask would be used for the other.
    tutorial._attn_fwd.cache.clear()
    warp_specialize = False  # the tutorial's own test enables it on Blackwell only
    options = case.causal, case.head_dim**-0.5, warp_specialize
    return heads_first(lambda q, k, v: tutorial.attention(q, k, v, *options))


# The command adds "Triton tutorial" if its file is given
CONTENDERS: dict[str, Callable[[Case, torch.device], Attention]] = {
    "ours": partial(ours, None),
    PORTABLE: partial(ours, "triton"),
    "SDPA flash": partial(sdpa, SDPBackend.FLASH_ATTENTION),
    "SDPA cuDNN": partial(sdpa, SDPBackend.CUDNN_ATTENTION),
    "SDPA flash, deterministic": partial(sdpa, SDPBackend.FLASH_ATTENTION),
    "SDPA math": partial(sdpa, SDPBackend.MATH),
    "FlexAttention": partial(flex, "AUTO"),
    "FlexAttention, FLASH": partial(flex, "FLASH"),
    "flash-attn-4": partial(flash_attn_4, False),
    "flash-attn-4, deterministic": partial(flash_attn_4, True),
    "standard": partial(ours, "eager"),
    **approximate.APPROXIMATE,
}
REPEATABLE = ("SDPA flash, deterministic", "flash-attn-4, deterministic")
"""Peers that are asked for the same bits in every run, which costs them time.

PyTorch refuses to ask that of cuDNN's attention.
"""

SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "SDPA flash, deterministic": deterministic_algorithms,
    **approximate.SETTINGS,
}

# Conversions for contenders that cannot take the tensors of the case; copying is not timed
TENSORS: dict[str, Callable[[Tensors], Tensors]] = {
    TUTORIAL: tutorial_tensors,
    **approximate.TENSORS,
}
