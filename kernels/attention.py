"""`flash_attention`, the one public function: it checks the call and picks who computes it."""

import importlib.util
import os
from typing import Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.ops import attn_fwd
from kernels.reference import standard_attention
from kernels.strides import MAX_ROW_STRIDE, rows_in_reach

IMPLS = ("triton", "sdpa", "reference")
MAX_HEAD_DIM = 128

# Both are read once: Triton itself looks at TRITON_INTERPRET when a kernel is defined, and
# torch.compile can trace neither look-up.
_HAS_TRITON = importlib.util.find_spec("triton") is not None
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@overload
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | int | None = None,
    return_lse: Literal[False] = False,
    impl: str | None = None,
) -> Tensor: ...


@overload
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | int | None = None,
    return_lse: Literal[True],
    impl: str | None = None,
) -> tuple[Tensor, Tensor]: ...


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | int | None = None,
    return_lse: bool = False,
    impl: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(q k^T * softmax_scale) v, exact, in memory linear in the sequence length.

    The causal mask aligns at the bottom right: query i sees key j iff j <= i + T_k - T_q. With
    T_q = 2, T_k = 4 and with T_q = 4, T_k = 2, where 1 is seen:

        1 1 1 0         0 0
        1 1 1 1         0 0
                        1 0
                        1 1

    A row that sees no key has output 0, lse -inf and gradients 0.

    Args:
        q: (B, T_q, H, D), fp16, bf16 or fp32; any strides with a contiguous last dimension, that
            of T up to 2^24 elements for impl="triton".
        k, v: (B, T_k, H_kv, D), same dtype and device. H is a multiple of H_kv: head h reads
            key-value head h // (H / H_kv) (grouped-query attention).
        causal: hide from each query the keys that come after it.
        softmax_scale: positive; default 1 / sqrt(D).
        dropout_p: probability, in [0, 1), with which an attention weight is set to zero; the
            others are divided by 1 - dropout_p.
        dropout_seed: int64 tensor with one element on the device of q, or an int; in [0, 2^63).
            What is dropped is a pure function of (seed, batch, head, query, key), the same in
            every implementation but "sdpa", which draws from PyTorch's generator and takes no
            seed.
        return_lse: also return the log-sum-exp of each row of scores, which has a gradient too.
        impl: "triton" (this project's kernels), "sdpa" (PyTorch's
            scaled_dot_product_attention), "reference" (standard attention, quadratic memory). None
            picks the fastest that serves the call. A named one that cannot serve it raises.

    Returns:
        out (B, T_q, H, D) in the dtype of q; with return_lse also lse (B, H, T_q), fp32, natural
        logarithm.

    Raises:
        ValueError: an argument is malformed, or the named impl cannot serve the call.

    Source: FlashAttention (arXiv 2205.14135) and FlashAttention-2 (arXiv 2307.08691).
    """
    _check(q, k, v, softmax_scale, dropout_p, impl)
    _check_dropout_seed(dropout_seed, q)
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** -0.5
    needs = {
        "causal with T_q != T_k": causal and q.shape[1] != k.shape[1],
        "return_lse=True": return_lse,
        "dropout_seed": dropout_seed is not None and dropout_p > 0,
    }
    impl = _pick(impl, q, k, v, needs)

    if impl == "sdpa":
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            dropout_p=dropout_p,
            is_causal=causal,
            scale=softmax_scale,
            enable_gqa=q.shape[2] != k.shape[2],
        )
        return out.transpose(1, 2)

    if dropout_p == 0:
        dropout_seed = None
    elif dropout_seed is None:
        raise ValueError(
            f"dropout_p={dropout_p} with impl={impl!r} needs dropout_seed: pass an int, or an "
            "int64 tensor with one element on the device of q"
        )
    elif not isinstance(dropout_seed, Tensor):
        dropout_seed = torch.tensor([dropout_seed], dtype=torch.int64, device=q.device)

    if impl == "reference":
        out, lse = standard_attention(
            q,
            k,
            v,
            causal=causal,
            softmax_scale=softmax_scale,
            dropout_p=dropout_p,
            dropout_seed=dropout_seed,
        )
    else:
        out, lse = attn_fwd(q, k, v, dropout_seed, softmax_scale, causal, dropout_p, impl)
    return (out, lse) if return_lse else out


def _pick(impl: str | None, q: Tensor, k: Tensor, v: Tensor, needs: dict[str, bool]) -> str:
    """The implementation to use: the one asked for if it can serve the call, or the fastest."""
    obstacles = {
        "triton": _triton_obstacle(q, k, v),
        "sdpa": next((f"it does not support {name}" for name, on in needs.items() if on), None),
        "reference": None,
    }
    if impl is None:
        # Interpreted kernels are right, but far too slow to be picked.
        candidates = IMPLS if q.device.type == "cuda" else ("sdpa", "reference")
        return next(name for name in candidates if obstacles[name] is None)
    if obstacles[impl] is not None:
        raise ValueError(
            f"impl={impl!r} cannot serve this call: {obstacles[impl]}. "
            "impl=None picks an implementation that can"
        )
    return impl


def _triton_obstacle(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    if not _HAS_TRITON:
        return "the package triton is not installed"
    if q.dtype == torch.float64:
        return "it computes in fp32, and q is float64"
    if q.device.type != "cuda" and not _INTERPRETED:
        return f"q is on {q.device}, and it needs a CUDA GPU (or TRITON_INTERPRET=1, for tests)"
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not rows_in_reach(tensor):
            return (
                f"it takes rows at most {MAX_ROW_STRIDE} elements apart, and {name} has shape "
                f"{tuple(tensor.shape)} and strides {tensor.stride()}: call .contiguous() on it"
            )
    return None


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    dropout_p: float,
    impl: str | None,
) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ValueError(f"{name} must be (B, T, H, D), got shape {tuple(tensor.shape)}")
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise ValueError(
                f"q, k and v must share dtype and device: q is {q.dtype} on {q.device}, "
                f"{name} is {tensor.dtype} on {tensor.device}"
            )
        if tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
            raise ValueError(
                f"the last dimension of {name} must be contiguous, got strides "
                f"{tensor.stride()}: call .contiguous() on it"
            )
        if 0 in tensor.shape:
            raise ValueError(f"{name} is empty: shape {tuple(tensor.shape)}")
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(f"q, k and v must be fp16, bf16 or fp32, got {q.dtype}")
    batch, _, n_head, head_dim = q.shape
    if k.shape != v.shape:
        raise ValueError(f"k and v must have one shape: {tuple(k.shape)} and {tuple(v.shape)}")
    if k.shape[0] != batch or k.shape[3] != head_dim:
        raise ValueError(
            f"q and k must share batch and head_dim: {tuple(q.shape)} and {tuple(k.shape)}"
        )
    if n_head % k.shape[2] != 0:
        raise ValueError(
            f"the heads of q must be a multiple of those of k and v: {n_head} and {k.shape[2]}"
        )
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim must be at most {MAX_HEAD_DIM}, got {head_dim}")
    if softmax_scale is not None and not softmax_scale > 0:
        raise ValueError(f"softmax_scale must be positive, got {softmax_scale}")
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p must lie in [0, 1), got {dropout_p}")
    if impl is not None and impl not in IMPLS:
        raise ValueError(f"impl must be None or one of {IMPLS}, got {impl!r}")


def _check_dropout_seed(seed: Tensor | int | None, q: Tensor) -> None:
    """The value of a tensor goes unchecked: reading it would wait for the GPU."""
    if seed is None:
        return
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.numel() != 1 or seed.device != q.device:
            raise ValueError(
                "dropout_seed must be an int64 tensor with one element on the device of q, got "
                f"{seed.dtype} of shape {tuple(seed.shape)} on {seed.device}: pass an int, or "
                f"torch.tensor([seed], dtype=torch.int64, device={str(q.device)!r})"
            )
    elif not isinstance(seed, int):
        raise ValueError(
            "dropout_seed must be an int or an int64 tensor, got "
            f"{seed!r} ({type(seed).__name__}): convert it with int()"
        )
    elif not 0 <= seed < 2**63:
        raise ValueError(f"dropout_seed must lie in [0, 2^63), got {seed}: take it modulo 2**63")
