"""Attention as operators that PyTorch knows: schema, fake, autograd and FLOP count of each.

An implementation is a module with `attn_fwd` and `attn_bwd`, named in `IMPLEMENTATIONS` and
imported when first called: this module needs neither Triton nor a GPU. torch.compile sees the
operators as they stand here, so it takes them without a graph break.
"""

import importlib
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

# name -> (module of the forward pass, module of the backward pass)
IMPLEMENTATIONS = {"triton": ("kernels.triton_fwd", "kernels.triton_bwd")}


def _module(impl: str, backward: bool) -> ModuleType:
    return importlib.import_module(IMPLEMENTATIONS[impl][backward])


@torch.library.custom_op("papilio::attn_fwd", mutates_args=())
def attn_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_seed: Tensor | None,
    softmax_scale: float,
    causal: bool,
    dropout_p: float,
    impl: str,
) -> tuple[Tensor, Tensor]:
    """out (B, T_q, H, D) and lse (B, H, T_q); arguments as in `kernels.flash_attention`."""
    # Triton launches on the current GPU, which need not be the one that holds q.
    with torch.cuda.device_of(q):
        return _module(impl, backward=False).attn_fwd(
            q,
            k,
            v,
            softmax_scale=softmax_scale,
            causal=causal,
            dropout_p=dropout_p,
            dropout_seed=dropout_seed,
        )


@attn_fwd.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_seed: Tensor | None,
    softmax_scale: float,
    causal: bool,
    dropout_p: float,
    impl: str,
) -> tuple[Tensor, Tensor]:
    batch, seq_q, n_head, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((batch, n_head, seq_q), dtype=torch.float32)


@torch.library.custom_op("papilio::attn_bwd", mutates_args=())
def attn_bwd(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dropout_seed: Tensor | None,
    softmax_scale: float,
    causal: bool,
    dropout_p: float,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv, contiguous, in the shapes and dtype of q, k and v."""
    # Triton launches on the current GPU, which need not be the one that holds q.
    with torch.cuda.device_of(q):
        return _module(impl, backward=True).attn_bwd(
            dout,
            dlse,
            q,
            k,
            v,
            out,
            lse,
            softmax_scale=softmax_scale,
            causal=causal,
            dropout_p=dropout_p,
            dropout_seed=dropout_seed,
        )


@attn_bwd.register_fake
def _(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dropout_seed: Tensor | None,
    softmax_scale: float,
    causal: bool,
    dropout_p: float,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, dropout_seed, *options = inputs
    ctx.save_for_backward(q, k, v, dropout_seed, *output)
    ctx.options = options
    # An lse that nobody used has gradient None, not a tensor of zeros to be read and added.
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, dropout_seed, out, lse = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    grads = attn_bwd(dout, dlse, q, k, v, out, lse, dropout_seed, *ctx.options)
    return (*grads, None, *(None for _ in ctx.options))


attn_fwd.register_autograd(_backward, setup_context=_setup_context)


def _visible_pairs(seq_q: int, seq_k: int, causal: bool) -> int:
    """Number of (query, key) pairs that are not masked, causal aligned at the bottom right."""
    if not causal:
        return seq_q * seq_k
    # row i sees min(seq_k, max(0, i + 1 + seq_k - seq_q)) keys
    rows = min(seq_q, seq_k)
    return rows * seq_k - rows * (rows - 1) // 2


@register_flop_formula(torch.ops.papilio.attn_fwd)
def _attn_fwd_flops(
    q_shape: tuple, k_shape: tuple, v_shape: tuple, seed: Any, scale: float, causal: bool, *_, **__
) -> int:
    """Two matrix products over the visible pairs: 4 B H D FLOPs a pair."""
    batch, seq_q, n_head, head_dim = q_shape
    return 4 * batch * n_head * head_dim * _visible_pairs(seq_q, k_shape[1], causal)


@register_flop_formula(torch.ops.papilio.attn_bwd)
def _attn_bwd_flops(
    dout_shape: tuple,
    dlse: Any,
    q_shape: tuple,
    k_shape: tuple,
    v_shape: tuple,
    fwd_out_shape: tuple,
    lse_shape: tuple,
    seed: Any,
    scale: float,
    causal: bool,
    *_,
    **__,
) -> int:
    """Five matrix products, one of them the recomputation: 2.5 times the forward pass."""
    return 5 * _attn_fwd_flops(q_shape, k_shape, v_shape, seed, scale, causal) // 2
