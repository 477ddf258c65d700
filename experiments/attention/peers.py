"""The contenders of experiments.attention.

A contender is a function of q, k and v (B, T, H, D) that returns out of the same shape. All
contenders of a case get the same tensors, but for those in TENSORS.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from experiments.attention.cases import DROPOUT_SEED, Attention, Case, Tensors
from experiments.harness import load_module
from kernels import flash_attention

TUTORIAL = "Triton tutorial"
PORTABLE = "ours, portable"  # the kernels for GPUs other than Hopper


class UnsupportedError(Exception):
    """A contender that cannot run this case here; the message says why."""


def padding_mask(case: Case, device: torch.device) -> Tensor | None:
    """(B, 1, 1, T) bool, True where there is a key; None without padding."""
    if not case.padded:
        return None
    keys = torch.arange(case.seq_len, device=device)
    return (keys < case.kv_lengths(device).unsqueeze(1))[:, None, None]


def ours(impl: str | None, case: Case, device: torch.device) -> Attention:
    """This project's kernels: the fastest (None), or those of an `impl` of `flash_attention`.

    "unfused" is its plain PyTorch, Algorithm 0 of the paper, which has no seed of dropout.
    """
    options: dict[str, Any] = {"causal": case.causal, "dropout_p": case.dropout_p}
    if case.sparsity is not None:
        options["mask"] = case.sparsity.mask(case.seq_len, device)
    if case.padded:
        options["kv_lengths"] = case.kv_lengths(device)
    if case.dropout_p > 0 and impl != "unfused":
        options["dropout_seed"] = torch.tensor([DROPOUT_SEED], device=device)
    return partial(flash_attention, impl=impl, **options)


def sdpa(backend: SDPBackend, case: Case, device: torch.device) -> Attention:
    """PyTorch's scaled_dot_product_attention on one backend, on transposed views."""
    padding = padding_mask(case, device)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        try:
            with sdpa_kernel(backend):
                out = F.scaled_dot_product_attention(
                    q.transpose(1, 2),
                    k.transpose(1, 2),
                    v.transpose(1, 2),
                    attn_mask=padding,
                    dropout_p=case.dropout_p,
                    is_causal=case.causal,
                )
        except RuntimeError as error:
            # What it says on a GPU, and what it says on a CPU.
            if not any(x in str(error) for x in ("No available kernel", "No viable backend")):
                raise
            raise UnsupportedError("PyTorch has no such kernel") from error
        return out.transpose(1, 2)

    return attend


def flex(case: Case, device: torch.device) -> Attention:
    """PyTorch's compiled FlexAttention, with a block mask for causal and for sparse attention."""
    mask = None
    if case.sparsity is not None:
        ours = case.sparsity.mask(case.seq_len, device)
        mask = ours.to_flex(case.seq_len, case.seq_len, causal=case.causal)
        if case.causal:
            # Compiled, it is asked about listed blocks only, which the layout need not confirm.
            mask.mask_mod = lambda b, h, i, j: i >= j
    elif case.causal:
        mask = create_block_mask(
            lambda b, h, i, j: i >= j, None, None, case.seq_len, case.seq_len, device=str(device)
        )
    return compiled_flex(mask)


def compiled_flex(mask: BlockMask | None) -> Attention:
    """FlexAttention under a block mask, compiled for it."""
    # Past a few recompilations PyTorch would run it uncompiled. A saved forward is run backward
    # many times here, which buffers that the backward gives away do not survive.
    torch._dynamo.reset()
    functorch_config.donated_buffer = False
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=False)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = compiled(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), block_mask=mask)
        return out.transpose(1, 2)

    return attend


def flash_attn_4(case: Case, device: torch.device) -> Attention:
    """The package flash-attn-4 (CuTe), where it is installed."""
    try:
        from flash_attn.cute import flash_attn_func  # pyright: ignore[reportMissingImports]
        from flash_attn.cute.block_sparsity import (  # pyright: ignore[reportMissingImports]
            BlockSparseTensorsTorch,
        )
    except ImportError as error:
        raise UnsupportedError(f"cannot be imported ({error})") from error
    options: dict[str, Any] = {"softmax_scale": case.head_dim**-0.5}
    if case.sparsity is None:
        options["causal"] = case.causal
    else:
        mask = case.sparsity.mask(case.seq_len, device)
        lists = mask.to_flex(case.seq_len, case.seq_len, causal=case.causal)
        if case.causal:
            options["mask_mod"] = cute_diagonal()
        options["block_sparse_tensors"] = BlockSparseTensorsTorch(
            lists.kv_num_blocks, lists.kv_indices, lists.full_kv_num_blocks, lists.full_kv_indices,
            block_size=lists.BLOCK_SIZE,
        )  # fmt: skip
        options["block_sparse_tensors_bwd"] = BlockSparseTensorsTorch(
            lists.q_num_blocks, lists.q_indices, lists.full_q_num_blocks, lists.full_q_indices,
            block_size=lists.BLOCK_SIZE,
        )  # fmt: skip

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result = flash_attn_func(q, k, v, **options)
        return result[0] if isinstance(result, tuple) else result

    return attend


def cute_diagonal() -> Callable[..., Any]:
    """What flash-attn-4 asks, of partial blocks, whether a query sees a key: its `causal` does not
    go with lists of blocks."""
    from cutlass import cute  # pyright: ignore[reportMissingImports]

    @cute.jit
    def sees(batch, head, query, key, seqlen_info, aux_tensors):
        return key <= query

    return sees


def load_tutorial(file: Path) -> ModuleType:
    """Triton's tutorial 06-fused-attention.py, as a module.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not that tutorial.
    """
    advice = "give Triton's 06-fused-attention.py, of the installed version"
    if not file.is_file():
        raise FileNotFoundError(f"--tutorial={file} is no file: {advice}")
    if file.suffix != ".py":
        raise ValueError(f"--tutorial={file} is no Python file: {advice}")
    module = load_module("triton_tutorial", file)
    if not hasattr(module, "attention") or not hasattr(module, "_attn_fwd"):
        raise ValueError(f"--tutorial={file} has no attention or no _attn_fwd: {advice}")
    return module


def tutorial_tensors(tensors: Tensors) -> Tensors:
    """Values in fp16 and, in memory, as (B, H, T, D): views of that, (B, T, H, D) each."""
    q, k, v, dout = (x.detach().transpose(1, 2).contiguous().half() for x in tensors)
    q, k, v, dout = (x.transpose(1, 2) for x in (q, k, v, dout))
    return Tensors(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout)


def triton_tutorial(tutorial: ModuleType, case: Case, device: torch.device) -> Attention:
    """Triton's tutorial on fused attention, from `load_tutorial`, on `tutorial_tensors`.

    It takes the same values in fp16 and in its own layout, because it knows no other.
    """
    if case.sparsity is not None or case.dropout_p > 0 or case.padded:
        raise UnsupportedError("the tutorial has no block-sparse mask, dropout or padding")
    if case.seq_len % 128 != 0:
        raise UnsupportedError("the tutorial takes multiples of 128 tokens")
    # It is tuned by length and head_dim, but not by `causal`: what it chose for one mask, it would
    # take for the other.
    tutorial._attn_fwd.cache.clear()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        warp_specialize = False  # which the tutorial's own test tries on Blackwell only
        out = tutorial.attention(q, k, v, case.causal, case.head_dim**-0.5, warp_specialize)
        return out.transpose(1, 2)

    return attend


# Also "Triton tutorial", where the command names its file
CONTENDERS: dict[str, Callable[[Case, torch.device], Attention]] = {
    "ours": partial(ours, None),
    PORTABLE: partial(ours, "triton"),
    "SDPA flash": partial(sdpa, SDPBackend.FLASH_ATTENTION),
    "SDPA cuDNN": partial(sdpa, SDPBackend.CUDNN_ATTENTION),
    "SDPA math": partial(sdpa, SDPBackend.MATH),
    "FlexAttention": flex,
    "flash-attn-4": flash_attn_4,
    "standard": partial(ours, "unfused"),
}

# What a contender is run on, where it cannot take the tensors of the case; copying is not timed
TENSORS: dict[str, Callable[[Tensors], Tensors]] = {TUTORIAL: tutorial_tensors}
