"""Attention as PyTorch operators, each with a schema, a fake, an autograd formula and FLOPs.

An implementation is a module with `attn_fwd` and `attn_bwd`, named in `IMPLEMENTATIONS` and
imported when first called: this module needs neither Triton nor a GPU. torch.compile does not look
inside these operators, so they cause no graph break.
"""

import functools
import importlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .options import (
    N_CALL_TENSORS,
    N_OPERATOR_OPTIONS,
    N_TENSORS,
    OPTIONS_SCHEMA,
    AttentionOptions,
)  # fmt: skip
from .reference.standard import finite
from .registration import not_differentiable, operator
from .transforms import is_plain_call

# name -> (module of the forward pass, module of the backward pass), within this package
IMPLEMENTATIONS = {
    "hopper": (".hopper.forward.launch", ".hopper.backward.launch"),
    "triton": (".triton.fwd", ".triton.bwd"),
}


@functools.cache
def module_of(impl: str, backward: bool) -> ModuleType:
    """Import the module with `attn_fwd` or `attn_bwd` of an implementation, on first use."""
    return importlib.import_module(IMPLEMENTATIONS[impl][backward], __package__)


def on_device(device: torch.device) -> AbstractContextManager:
    """Context that makes `device` the current GPU, as Triton launches on the current one."""
    if device.type != "cuda" or torch.cuda.current_device() == device.index:
        return _NOTHING
    return torch.cuda.device(device)


_NOTHING = nullcontext()


def _fake_fwd(q: Tensor, k: Tensor, v: Tensor, impl: str, *options: Any) -> tuple[Tensor, Tensor]:
    batch, seq_q, n_head, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((batch, n_head, seq_q), dtype=torch.float32)


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    ctx.n_inputs = 1 if isinstance(inputs[1], str) else 3  # qkv, or q, k and v
    ctx.impl, *options = inputs[ctx.n_inputs :]
    ctx.save_for_backward(*output, *inputs[: ctx.n_inputs], *options[:N_TENSORS])
    ctx.numbers = options[N_TENSORS:]
    # The gradient of an unused lse is then None, not a tensor of zeros that a kernel must read.
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients of all arguments of the operators: inputs, impl and options."""
    out, lse, *rest = ctx.saved_tensors
    inputs, options = rest[: ctx.n_inputs], (*rest[ctx.n_inputs :], *ctx.numbers)
    dout = torch.zeros_like(out) if dout is None else dout
    if ctx.n_inputs == 1:
        grads = (attn_packed_bwd(dout, dlse, *inputs, out, lse, ctx.impl, *options),)
    else:
        grads = attn_bwd(dout, dlse, *inputs, out, lse, ctx.impl, *options)
    sinks_index = AttentionOptions._fields.index("sinks")
    option_grads: list[Tensor | None] = [None] * N_OPERATOR_OPTIONS
    if ctx.needs_input_grad[ctx.n_inputs + 1 + sinks_index]:
        option_grads[sinks_index] = _sinks_gradient(options[sinks_index], out, dout, lse, dlse)
    return (*grads, None, *option_grads)


def _sinks_gradient(
    sinks: Tensor, out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None
) -> Tensor:
    """Gradient of the sinks, (H,).

    A sink is one more score of each row, and its value is zero: ds = p * (0 - delta).
    """
    delta = (out.float() * dout.float()).sum(-1).transpose(1, 2)  # (B, H, T_q)
    if dlse is not None:
        delta = delta - dlse
    # A row with neither a visible key nor a finite sink has lse -inf, and -inf - -inf is NaN.
    p = torch.exp(sinks[:, None] - finite(lse))
    return -(p * delta).sum(dim=(0, 2))


def _visible_pairs(seq_q: int, seq_k: int, causal: bool, window_size: int) -> int:
    """Number of (query, key) pairs that are not masked, causal aligned at the bottom right."""

    def before(end: int) -> int:
        """Number of pairs with key < query + end."""
        # Row i has min(seq_k, max(0, i + end)) of them: rows of zero, of i + end, and of all keys.
        empty = min(seq_q, max(0, -end))
        whole = min(seq_q, max(0, seq_k - end))
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
    """FLOPs of the forward pass, two matrix products: 4 B H D for each visible (query, key) pair.

    Blocks of a mask count in full. Pairs that documents and padding hide count as visible, because
    only the GPU knows them.
    """
    batch, seq_q, n_head, head_dim = q_shape
    call = AttentionOptions(*options)
    if call.mask_rows is None or call.mask_row_blocks is None:
        pairs = n_head * _visible_pairs(seq_q, k_shape[1], call.causal, call.window_size)
    else:
        # The FLOP counter passes shapes in place of tensors. The lists are of one layout for all
        # heads, or of one for each head.
        (n_layouts, *_), (n_blocks,) = call.mask_rows, call.mask_row_blocks
        pairs = n_blocks * (n_head // n_layouts) * call.mask_block_size**2
    return 4 * batch * head_dim * pairs


def _packed_flops(qkv_shape: tuple, *rest: Any) -> int:
    shape = (*qkv_shape[:2], *qkv_shape[3:])
    return _flops(shape, shape, shape, *rest)


def _q_k_v(inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, or their gradients: as given, or as views of one packed tensor."""
    q, k, v = inputs if len(inputs) == 3 else inputs[0].unbind(2)
    return q, k, v


def launch_fwd(
    q: Tensor, k: Tensor, v: Tensor, impl: str, options: AttentionOptions,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run the forward pass: out (B, T_q, H, D), contiguous unless it is given, lse (B, H, T_q)."""
    with on_device(q.device):
        return module_of(impl, backward=False).attn_fwd(q, k, v, options, out)


def launch_bwd(
    grads: tuple[Tensor, Tensor | None], inputs: Sequence[Tensor], results: tuple[Tensor, Tensor],
    impl: str, options: AttentionOptions, input_grads: Sequence[Tensor],
) -> None:  # fmt: skip
    """Run the backward pass.

    Args:
        grads: dout and dlse; inputs: q, k and v, or one tensor of them; results: out and lse.
        input_grads: written; as the inputs, with any strides that they may have.
    """
    with on_device(inputs[0].device):
        module_of(impl, backward=True).attn_bwd(
            *grads, *_q_k_v(inputs), *results, options, _q_k_v(input_grads)
        )


@operator(
    "attn_fwd",
    schema=f"(Tensor q, Tensor k, Tensor v, str impl, {OPTIONS_SCHEMA}) -> (Tensor, Tensor)",
    fake=_fake_fwd,
    setup_context=_setup_context,
    backward=_backward,
    flops=_flops,
)
def _attn_fwd(q: Tensor, k: Tensor, v: Tensor, impl: str, *options: Any) -> tuple[Tensor, Tensor]:
    """Return out (B, T_q, H, D) and lse (B, H, T_q); options are fields of `AttentionOptions`."""
    return launch_fwd(q, k, v, impl, AttentionOptions(*options))


# For q, k and v in one tensor (B, T, 3, H, D). Its gradient is one tensor as well, and the kernels
# write it directly: with `attn_fwd`, autograd would copy three gradients into it.
@operator(
    "attn_packed_fwd",
    schema=f"(Tensor qkv, str impl, {OPTIONS_SCHEMA}) -> (Tensor, Tensor)",
    fake=lambda qkv, *rest: _fake_fwd(*qkv.unbind(2), *rest),
    setup_context=_setup_context,
    backward=_backward,
    flops=_packed_flops,
)
def _attn_packed_fwd(qkv: Tensor, impl: str, *options: Any) -> tuple[Tensor, Tensor]:
    return launch_fwd(*_q_k_v((qkv,)), impl, AttentionOptions(*options))


def _input_gradients(
    grads: tuple[Tensor, Tensor | None], inputs: Sequence[Tensor], results: tuple[Tensor, Tensor],
    impl: str, options: AttentionOptions,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of q, k and v, or of one tensor of them: contiguous, in their shapes and dtype."""
    input_grads = tuple(
        [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]
    )
    launch_bwd(grads, inputs, results, impl, options, input_grads)
    return input_grads


_NO_SECOND_DERIVATIVE = (
    "attention has no second derivative: only impl='reference' can be differentiated twice"
)


@operator(
    "attn_bwd",
    schema="(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"str impl, {OPTIONS_SCHEMA}) -> (Tensor, Tensor, Tensor)",
    fake=lambda dout, dlse, q, k, v, *_: tuple(x.new_empty(x.shape) for x in (q, k, v)),
    backward=not_differentiable(_NO_SECOND_DERIVATIVE),
    # five matrix products, one of them the recomputation
    flops=lambda dout, dlse, q, k, v, out, lse, *rest: 5 * _flops(q, k, v, *rest) // 2,
)
def _attn_bwd(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    impl: str, *options: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    call = AttentionOptions(*options)
    return _input_gradients((dout, dlse), (q, k, v), (out, lse), impl, call)  # pyright: ignore


@operator(
    "attn_packed_bwd",
    schema="(Tensor dout, Tensor? dlse, Tensor qkv, Tensor out, Tensor lse, "
    f"str impl, {OPTIONS_SCHEMA}) -> Tensor",
    fake=lambda dout, dlse, qkv, *_: qkv.new_empty(qkv.shape),
    backward=not_differentiable(_NO_SECOND_DERIVATIVE),
    flops=lambda dout, dlse, qkv, out, lse, *rest: 5 * _packed_flops(qkv, *rest) // 2,
)
def _attn_packed_bwd(
    dout: Tensor, dlse: Tensor | None, qkv: Tensor, out: Tensor, lse: Tensor, impl: str,
    *options: Any,
) -> Tensor:  # fmt: skip
    call = AttentionOptions(*options)
    return _input_gradients((dout, dlse), (qkv,), (out, lse), impl, call)[0]


attn_fwd = torch.ops.papilio.attn_fwd.default
attn_bwd = torch.ops.papilio.attn_bwd.default
attn_packed_fwd = torch.ops.papilio.attn_packed_fwd.default
attn_packed_bwd = torch.ops.papilio.attn_packed_bwd.default


def attention(
    inputs: tuple[Tensor, ...], impl: str, options: AttentionOptions, *, is_plain: bool
) -> tuple[Tensor, Tensor | None]:
    """Differentiable attention, eager or under torch.compile: out (B, T_q, H, D), lse (B, H, T_q).

    In an eager call that does not return lse, it may be None: each output costs CPU time.

    Args:
        inputs: q, k and v, or one tensor (B, T, 3, H, D) of them.
        is_plain: `kernels.transforms.is_plain_call` of the inputs.
    """
    if torch.compiler.is_compiling():
        forward = attn_packed_fwd if len(inputs) == 1 else attn_fwd
        return forward(*inputs, impl, *options[:N_OPERATOR_OPTIONS])
    if is_plain and not torch.is_grad_enabled():
        return launch_fwd(*_q_k_v(inputs), impl, options)
    results = _Attention.apply(options.sinks, (impl, options, is_plain), *inputs)
    return (results, None) if isinstance(results, Tensor) else results


class _Attention(torch.autograd.Function):
    """Eager attention: the autograd of torch.library would take most of a call's CPU time.

    A plain call launches the kernels directly, without the dispatcher, which boxes every option.
    """

    @staticmethod
    def forward(
        ctx: Any, sinks: Tensor | None, call: tuple[str, AttentionOptions, bool], *inputs: Tensor
    ) -> Tensor | tuple[Tensor, Tensor]:
        # The options hold the sinks as well: they are an argument only to get a gradient.
        impl, options, is_plain = call
        if is_plain:
            out, lse = launch_fwd(*_q_k_v(inputs), impl, options)
        else:
            forward = attn_packed_fwd if len(inputs) == 1 else attn_fwd
            # Skip the operator's own autograd formula, which this function replaces.
            with torch._C._AutoDispatchBelowAutograd():
                out, lse = forward(*inputs, impl, *options[:N_OPERATOR_OPTIONS])
        ctx.save_for_backward(out, lse, *inputs, *options[:N_CALL_TENSORS])
        ctx.impl, ctx.options = impl, options.without_tensors()
        ctx.has_tensors = options.has_tensors
        # As in `_setup_context`: no tensor of zeros for an unused lse.
        ctx.set_materialize_grads(False)
        # Sinks need lse as an output: their gradient can be differentiated again, through both.
        return (out, lse) if options.return_lse or ctx.needs_input_grad[0] else out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        dout, dlse = grads if len(grads) == 2 else (*grads, None)
        out, lse, *rest = ctx.saved_tensors
        inputs, options = rest[:-N_CALL_TENSORS], ctx.options
        if ctx.has_tensors:
            tensors = rest[-N_CALL_TENSORS:]
            options = AttentionOptions._make((*tensors, *options[N_CALL_TENSORS:]))
        dout = torch.zeros_like(out) if dout is None else dout
        output_grads = [x for x in (dout, dlse) if x is not None]
        if is_plain_call(*output_grads, *inputs) and not torch.is_grad_enabled():
            input_grads = _input_gradients((dout, dlse), inputs, (out, lse), ctx.impl, options)
        else:
            # The operator is visible to the dispatcher, and refuses a second derivative.
            backward = attn_packed_bwd if len(inputs) == 1 else attn_bwd
            numbers = options[:N_OPERATOR_OPTIONS]
            input_grads = backward(dout, dlse, *inputs, out, lse, ctx.impl, *numbers)
            input_grads = (input_grads,) if len(inputs) == 1 else input_grads
        dsinks = None
        if ctx.needs_input_grad[0]:
            assert options.sinks is not None
            dsinks = _sinks_gradient(options.sinks, out, dout, lse, dlse)
        return dsinks, None, *input_grads
