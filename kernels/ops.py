"""Attention as operators that PyTorch knows: schema, fake, autograd and FLOP count of each.

An implementation is a module with `attn_fwd` and `attn_bwd`, named in `IMPLEMENTATIONS` and
imported when first called: this module needs neither Triton nor a GPU. torch.compile sees the
operators as they stand here, so it takes them without a graph break.
"""

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .options import OPTIONS_SCHEMA, AttentionOptions
from .reference.standard import finite
from .registration import operator

# name -> (module of the forward pass, module of the backward pass), within this package
IMPLEMENTATIONS = {
    "hopper": (".hopper.forward.kernel", ".hopper.backward.kernel"),
    "triton": (".triton.fwd", ".triton.bwd"),
}

N_OPTIONS = len(AttentionOptions._fields)


def module_of(impl: str, backward: bool) -> ModuleType:
    """That of a pass, with `attn_fwd` or `attn_bwd`; imported when first used."""
    return importlib.import_module(IMPLEMENTATIONS[impl][backward], __package__)


def _fake_fwd(q: Tensor, k: Tensor, v: Tensor, impl: str, *options: Any) -> tuple[Tensor, Tensor]:
    batch, seq_q, n_head, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((batch, n_head, seq_q), dtype=torch.float32)


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    ctx.n_inputs = 1 if isinstance(inputs[1], str) else 3  # qkv, or q, k and v
    ctx.impl, *options = inputs[ctx.n_inputs :]
    # Tensors must be saved by save_for_backward; the other options go beside them.
    ctx.is_tensor = [isinstance(option, Tensor) for option in options]
    tensors = [option for option in options if isinstance(option, Tensor)]
    ctx.save_for_backward(*output, *inputs[: ctx.n_inputs], *tensors)
    ctx.others = [option for option in options if not isinstance(option, Tensor)]
    # An lse that nobody used has gradient None, not a tensor of zeros to be read and added.
    ctx.set_materialize_grads(False)


def _gradients(
    ctx: Any, dout: Tensor | None, dlse: Tensor | None, sinks_need_grad: bool
) -> tuple[Tensor | None, ...]:
    """Of q, k and v, or of qkv; and of the sinks."""
    out, lse, *rest = ctx.saved_tensors
    inputs, tensors = rest[: ctx.n_inputs], rest[ctx.n_inputs :]
    sources = {True: iter(tensors), False: iter(ctx.others)}
    options = AttentionOptions(*(next(sources[is_tensor]) for is_tensor in ctx.is_tensor))
    if dout is None:
        dout = torch.zeros_like(out)
    if ctx.n_inputs == 1:
        grads = (attn_packed_bwd(dout, dlse, *inputs, out, lse, ctx.impl, *options),)
    else:
        grads = attn_bwd(dout, dlse, *inputs, out, lse, ctx.impl, *options)
    if options.sinks is None or not sinks_need_grad:
        return *grads, None
    return *grads, _sinks_gradient(options.sinks, out, dout, lse, dlse)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    place = AttentionOptions._fields.index("sinks")
    needed = ctx.needs_input_grad[ctx.n_inputs + 1 + place]
    *grads, dsinks = _gradients(ctx, dout, dlse, needed)
    option_grads: list[Tensor | None] = [None] * N_OPTIONS
    option_grads[place] = dsinks
    return (*grads, None, *option_grads)


def _sinks_gradient(
    sinks: Tensor, out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None
) -> Tensor:
    """(H,): a sink is one more score of each row, whose value is zero: ds = p * (0 - delta)."""
    delta = (out.float() * dout.float()).sum(-1).transpose(1, 2)  # (B, H, T_q)
    if dlse is not None:
        delta = delta - dlse
    # -inf - -inf is NaN: lse of a row that sees neither a key nor this sink
    p = torch.exp(sinks[:, None] - finite(lse))
    return -(p * delta).sum(dim=(0, 2))


def _visible_pairs(seq_q: int, seq_k: int, causal: bool, window_size: int) -> int:
    """Number of (query, key) pairs that are not masked, causal aligned at the bottom right."""

    def before(end: int) -> int:
        """Pairs with key < query + end, for the query at position 0 and on."""
        # row i has min(seq_k, max(0, i + end)) of them
        empty = min(seq_q, max(0, -end))
        whole = min(seq_q, max(0, seq_k - end))  # from this row on, all keys
        rows = max(0, whole - empty)
        return rows * end + (empty + whole - 1) * rows // 2 + (seq_q - max(whole, empty)) * seq_k

    diagonal = seq_k - seq_q
    pairs = seq_q * seq_k
    if causal:
        pairs = before(diagonal + 1)
    elif window_size:
        pairs = before(diagonal + window_size)
    if window_size:
        pairs -= before(diagonal - window_size + 1)
    return pairs


def _flops(q_shape: tuple, k_shape: tuple, v_shape: tuple, impl: str, *options: Any) -> int:
    """Two matrix products over the visible pairs: 4 B H D FLOPs a pair.

    Blocks of a mask count whole. What documents and padding hide is known only on the GPU, and
    counts as visible.
    """
    batch, seq_q, n_head, head_dim = q_shape
    asked = AttentionOptions(*options)
    if asked.mask_rows is None or asked.mask_row_blocks is None:
        pairs = n_head * _visible_pairs(seq_q, k_shape[1], asked.causal, asked.window_size)
    else:
        # shapes: of one layout, or of one a head
        (n_layouts, *_), (n_blocks,) = asked.mask_rows, asked.mask_row_blocks
        pairs = n_blocks * (n_head // n_layouts) * asked.mask_block_size**2
    return 4 * batch * head_dim * pairs


def _packed_flops(qkv_shape: tuple, *rest: Any) -> int:
    shape = (*qkv_shape[:2], *qkv_shape[3:])
    return _flops(shape, shape, shape, *rest)


def _launch_fwd(
    q: Tensor, k: Tensor, v: Tensor, impl: str, options: tuple
) -> tuple[Tensor, Tensor]:
    # Triton launches on the current GPU, which need not be the one that holds q.
    with torch.cuda.device_of(q):
        return module_of(impl, backward=False).attn_fwd(q, k, v, AttentionOptions(*options))


@operator(
    "attn_fwd",
    schema=f"(Tensor q, Tensor k, Tensor v, str impl, {OPTIONS_SCHEMA}) -> (Tensor, Tensor)",
    fake=_fake_fwd,
    gradient=(_setup_context, _backward),
    flops=_flops,
)
def _attn_fwd(q: Tensor, k: Tensor, v: Tensor, impl: str, *options: Any) -> tuple[Tensor, Tensor]:
    """out (B, T_q, H, D) and lse (B, H, T_q); options are the fields of `AttentionOptions`."""
    return _launch_fwd(q, k, v, impl, options)


# The same of q, k and v in one tensor (B, T, 3, H, D), whose gradient is one tensor, too.
@operator(
    "attn_packed_fwd",
    schema=f"(Tensor qkv, str impl, {OPTIONS_SCHEMA}) -> (Tensor, Tensor)",
    fake=lambda qkv, *rest: _fake_fwd(*qkv.unbind(2), *rest),
    gradient=(_setup_context, _backward),
    flops=_packed_flops,
)
def _attn_packed_fwd(qkv: Tensor, impl: str, *options: Any) -> tuple[Tensor, Tensor]:
    q, k, v = qkv.unbind(2)
    return _launch_fwd(q, k, v, impl, options)


def _launch_bwd(
    grads: Sequence[Tensor], inputs: tuple[Tensor | None, ...], impl: str, options: tuple
) -> None:
    """Write dq, dk and dv; inputs are dout, dlse, q, k, v, out and lse."""
    with torch.cuda.device_of(grads[0]):
        module_of(impl, backward=True).attn_bwd(*inputs, AttentionOptions(*options), grads)


_NO_SECOND_DERIVATIVE = (
    "attention has no second derivative: only impl='reference' can be differentiated twice"
)


@operator(
    "attn_bwd",
    schema="(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"str impl, {OPTIONS_SCHEMA}) -> (Tensor, Tensor, Tensor)",
    fake=lambda dout, dlse, q, k, v, *_: tuple(x.new_empty(x.shape) for x in (q, k, v)),
    gradient=_NO_SECOND_DERIVATIVE,
    # five matrix products, one of them the recomputation
    flops=lambda dout, dlse, q, k, v, out, lse, *rest: 5 * _flops(q, k, v, *rest) // 2,
)
def _attn_bwd(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    impl: str,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv, contiguous, in the shapes and dtype of q, k and v."""
    grads = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    _launch_bwd(grads, (dout, dlse, q, k, v, out, lse), impl, options)
    return grads


@operator(
    "attn_packed_bwd",
    schema="(Tensor dout, Tensor? dlse, Tensor qkv, Tensor out, Tensor lse, "
    f"str impl, {OPTIONS_SCHEMA}) -> Tensor",
    fake=lambda dout, dlse, qkv, *_: qkv.new_empty(qkv.shape),
    gradient=_NO_SECOND_DERIVATIVE,
    flops=lambda dout, dlse, qkv, out, lse, *rest: 5 * _packed_flops(qkv, *rest) // 2,
)
def _attn_packed_bwd(
    dout: Tensor,
    dlse: Tensor | None,
    qkv: Tensor,
    out: Tensor,
    lse: Tensor,
    impl: str,
    *options: Any,
) -> Tensor:
    """The gradient of qkv, contiguous."""
    dqkv = qkv.new_empty(qkv.shape)
    _launch_bwd(dqkv.unbind(2), (dout, dlse, *qkv.unbind(2), out, lse), impl, options)
    return dqkv


attn_fwd = torch.ops.papilio.attn_fwd.default
attn_bwd = torch.ops.papilio.attn_bwd.default
attn_packed_fwd = torch.ops.papilio.attn_packed_fwd.default
attn_packed_bwd = torch.ops.papilio.attn_packed_bwd.default


class _Attention(torch.autograd.Function):
    """The operators in eager mode, where torch.library's autograd takes most of a call's time.

    What needs a gradient is an argument of its own, the rest is passed as one, because each
    argument costs the CPU time.
    """

    @staticmethod
    def forward(
        ctx: Any,
        sinks: Tensor | None,
        impl: str,
        options: AttentionOptions,
        *inputs: Tensor,
    ) -> tuple[Tensor, Tensor]:
        given = (*inputs, impl, *options)
        with torch._C._AutoDispatchBelowAutograd():  # past the operator's own autograd
            output = attn_packed_fwd(*given) if len(inputs) == 1 else attn_fwd(*given)
        _setup_context(ctx, given, output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        dout, dlse = grads
        *of_inputs, dsinks = _gradients(ctx, dout, dlse, ctx.needs_input_grad[0])
        return dsinks, None, None, *of_inputs


def attention(
    inputs: tuple[Tensor, ...], impl: str, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """out (B, T_q, H, D) and lse (B, H, T_q), differentiable, eager or under torch.compile.

    `inputs` are q, k and v, or one tensor (B, T, 3, H, D) of them.
    """
    if torch.compiler.is_compiling():
        forward = attn_packed_fwd if len(inputs) == 1 else attn_fwd
        return forward(*inputs, impl, *options)
    return _Attention.apply(options.sinks, impl, options, *inputs)
