"""`linear_cross_entropy`: the loss of a language model's head, without all logits in memory.

The logits of 32,768 tokens over 50,304 entries take 3 GiB, and their gradient another 3 GiB. Here
the logits exist for one chunk of rows at a time, and their gradient overwrites them. The gradient
of a sum of losses is known together with the losses, so one pass over the chunks computes both.

Shapes: N rows, C width of a hidden state, V rows of the weight.
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .. import triton
from ..argument_types import check_number, check_tensors, check_whole_number
from ..autocast import in_autocast_dtype
from ..limits import chunk_rows
from ..registration import operator
from ..transforms import refuse_derivatives
from .cast_cache import cast_weight
from .dispatch import module_of, select_impl
from .matmul import addmm_


class LossOptions(NamedTuple):
    """Options of the operators, in the order of their schema."""

    vocab_size: int  # rows of the weight that count; the others are padding
    softcap: float  # 0 without a cap
    z_loss: float
    ignore_index: int


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor,
    *, reduction: Literal["mean", "sum", "none"] = "mean", vocab_size: int | None = None,
    softcap: float | None = None, z_loss: float = 0.0, ignore_index: int = -100,
    impl: str | None = None,
) -> Tensor:  # fmt: skip
    """Cross-entropy of the logits `hidden @ weight.T`, without all logits in memory.

    The loss of a row with logits x and target t is lse - x[t] + z_loss * lse^2, where lse is the
    logarithm of the sum of exp(x). Matrix products are in the dtype of `hidden`, or that of
    autocast; losses and the gradient of the weight accumulate in fp32 (fp64 for fp64). Repeated
    calls give the same bits.

    Args:
        hidden: (..., C) states, fp16, bf16, fp32 or fp64. The target of a position is the next
            token: the caller shifts the tokens.
        weight: (V, C), of any floating dtype; its gradient has that dtype.
        targets: (...) int64, in [0, vocab_size) or `ignore_index`. Another value makes the loss
            NaN with impl="triton", because a check would wait for the GPU.
        reduction: "mean" over the targets that count, their "sum", or "none": the loss of each
            target, 0 if it does not count. If none counts, the mean is NaN and gradients are 0.
            With "none", the backward pass computes the logits again.
        vocab_size: rows of the weight that count, at most V; the others are padding. None: all.
        softcap: c > 0 replaces a logit x by c * tanh(x / c) (Gemma 2, arXiv 2408.00118).
        z_loss: weight of lse^2, which keeps logits from drifting (PaLM, arXiv 2204.02311).
        ignore_index: target of positions without a loss.
        impl: "triton" (a kernel, for a GPU) or "reference" (PyTorch, any device); None picks.

    Returns:
        The loss, in nats and fp32 (fp64 for fp64): a scalar, or of the shape of `targets`.

    Raises:
        ValueError: an argument is malformed, or the named impl cannot serve the call.
    """
    refuse_derivatives("linear_cross_entropy", "torch.nn.functional.cross_entropy")
    check_tensors(hidden=hidden, weight=weight, targets=targets)
    check_whole_number("vocab_size", vocab_size, or_none=True)
    check_number("softcap", softcap, or_none=True)
    check_number("z_loss", z_loss)
    check_whole_number("ignore_index", ignore_index)
    _check_inputs(hidden, weight, targets)
    vocab_size = weight.shape[0] if vocab_size is None else vocab_size
    _check_options(reduction, vocab_size, weight.shape[0], softcap, z_loss)
    hidden = in_autocast_dtype(hidden)
    impl = select_impl(impl, hidden, triton=triton.unsupported_device(hidden, "hidden"))
    options = LossOptions(vocab_size, softcap or 0.0, z_loss, ignore_index)
    inputs = hidden.flatten(0, -2), weight, targets.flatten(), impl, *options
    needs_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    if reduction == "none" or not needs_grad:
        losses = torch.ops.papilio.linear_cross_entropy(*inputs)
        if reduction == "none":
            return losses.view_as(targets)
        loss = losses.sum()
    else:
        loss, *_ = torch.ops.papilio.linear_cross_entropy_grad(*inputs, None)
    if reduction == "sum":
        return loss
    n_counted = (targets != ignore_index).sum()
    # NaN if no target counts, as in PyTorch. Dividing 0 by 0 would make the gradients NaN as well.
    return torch.where(n_counted > 0, loss / n_counted.clamp(min=1), torch.nan)


def _check_inputs(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    if hidden.dim() < 2 or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        shapes = f"{tuple(hidden.shape)} and {tuple(weight.shape)}"
        raise ValueError(f"hidden must be (..., C) and weight (V, C), got {shapes}")
    if not hidden.is_floating_point() or not weight.is_floating_point():
        dtypes = f"{hidden.dtype} and {weight.dtype}"
        raise ValueError(f"hidden and weight must be floating-point, got {dtypes}")
    if targets.shape != hidden.shape[:-1] or targets.dtype != torch.int64:
        raise ValueError(
            f"targets must be int64 and {tuple(hidden.shape[:-1])}, one for each state of hidden, "
            f"got {targets.dtype} and {tuple(targets.shape)}"
        )
    if not hidden.device == weight.device == targets.device:
        devices = f"{hidden.device}, {weight.device} and {targets.device}"
        raise ValueError(f"hidden, weight and targets must be on one device, got {devices}")


def _check_options(
    reduction: str, vocab_size: int, n_rows: int, softcap: float | None, z_loss: float
) -> None:
    if not isinstance(reduction, str) or reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
    if not 1 <= vocab_size <= n_rows:
        bounds = f"[1, {n_rows}], the rows of weight"
        raise ValueError(f"vocab_size must lie in {bounds}, got {vocab_size}")
    if softcap is not None and not 0 < softcap < float("inf"):
        raise ValueError(f"softcap must be None or a finite number above 0, got {softcap}")
    if not 0 <= z_loss < float("inf"):
        raise ValueError(f"z_loss must be a finite number of at least 0, got {z_loss}")


def _by_chunks(
    hidden: Tensor, weight: Tensor, targets: Tensor, impl: str, options: LossOptions,
    row_weights: Tensor | None = None, *, with_gradients: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Losses (N,) and, if wanted, gradients of their weighted sum: dhidden and dweight."""
    n_rows, table = hidden.shape[0], cast_weight(weight, hidden.dtype)
    targets = targets.contiguous()
    # The gradient of a sum is one number with stride 0, and the kernel indexes without a stride.
    if row_weights is not None:
        row_weights = row_weights.contiguous()
    losses = hidden.new_empty(n_rows, dtype=_sum_dtype(hidden))
    dhidden = hidden.new_empty(hidden.shape) if with_gradients else None
    # The first chunk overwrites this sum, so zeros are needed only if there is no chunk.
    make = weight.new_empty if n_rows > 0 else weight.new_zeros
    dweight = make(weight.shape, dtype=losses.dtype) if with_gradients else None
    row_cross_entropy = module_of(impl, "cross_entropy").row_cross_entropy
    rows = chunk_rows(n_rows, table.shape[0] * table.element_size())
    buffer = hidden.new_empty(min(rows, n_rows), table.shape[0])
    # Triton launches on the current GPU, which need not be that of the tensors. Autocast has
    # already set the dtype of `hidden`.
    with torch.cuda.device_of(hidden), torch.autocast(hidden.device.type, enabled=False):
        for first in range(0, n_rows, rows):
            chunk = slice(first, first + rows)
            states = hidden[chunk]
            # 1. Logits of the chunk, in the buffer that all chunks share.
            logits = torch.mm(states, table.T, out=buffer[: len(states)])
            # 2. Their losses. If gradients are wanted, they overwrite the logits here.
            weights = None if row_weights is None else row_weights[chunk]
            row_cross_entropy(
                logits, targets[chunk], losses[chunk], options, weights, with_gradients
            )
            # 3. Gradients of the states of this chunk, and of the weight, summed over chunks.
            if dhidden is not None and dweight is not None:
                torch.mm(logits, table, out=dhidden[chunk])
                addmm_(dweight, logits.T, states, accumulate=first > 0)
    return losses, dhidden, None if dweight is None else dweight.to(weight.dtype)


def _sum_dtype(hidden: Tensor) -> torch.dtype:
    return torch.promote_types(hidden.dtype, torch.float32)


# ---- the operators: single losses, and the sum of losses together with its gradients

_OPTIONS = "int vocab_size, float softcap, float z_loss, int ignore_index"


def _save_inputs(ctx: Any, inputs: tuple, output: Tensor) -> None:
    hidden, weight, targets, *ctx.others = inputs
    ctx.save_for_backward(hidden, weight, targets)


def _backward_of_losses(ctx: Any, dlosses: Tensor) -> tuple[Tensor | None, ...]:
    _, dhidden, dweight = torch.ops.papilio.linear_cross_entropy_grad(
        *ctx.saved_tensors, *ctx.others, dlosses
    )
    return dhidden, dweight, None, *(None for _ in ctx.others)


@operator(
    "linear_cross_entropy",
    schema=f"(Tensor hidden, Tensor weight, Tensor targets, str impl, {_OPTIONS}) -> Tensor",
    fake=lambda x, weight, targets, *_: x.new_empty(targets.shape, dtype=_sum_dtype(x)),
    setup_context=_save_inputs,
    backward=_backward_of_losses,
    flops=lambda hidden, weight, *_: 2 * hidden[0] * weight[0] * weight[1],
)
def _losses(hidden: Tensor, weight: Tensor, targets: Tensor, impl: str, *options: Any) -> Tensor:
    """Losses, (N,)."""
    return _by_chunks(hidden, weight, targets, impl, LossOptions(*options))[0]


def _fake_gradients(hidden, weight, *_):
    loss = hidden.new_empty((), dtype=_sum_dtype(hidden))
    return loss, hidden.new_empty(hidden.shape), weight.new_empty(weight.shape)


def _save_gradients(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.n_others = len(inputs) - 2
    ctx.set_materialize_grads(False)


def _scale_gradients(ctx: Any, dloss: Tensor | None, *second: Tensor | None) -> tuple[Any, ...]:
    if any(grad is not None for grad in second):
        raise RuntimeError(
            "linear_cross_entropy has no second derivative: differentiate "
            "torch.nn.functional.cross_entropy twice instead"
        )
    if dloss is None:
        return (None,) * (2 + ctx.n_others)
    # The gradients were computed with the loss, for dloss = 1.
    scaled = ((grad * dloss).to(grad.dtype) for grad in ctx.saved_tensors)
    return *scaled, *(None,) * ctx.n_others


# row_weights: (N,) fp32, a factor on each row's loss; None: 1.
@operator(
    "linear_cross_entropy_grad",
    schema=f"(Tensor hidden, Tensor weight, Tensor targets, str impl, {_OPTIONS}, "
    "Tensor? row_weights) -> (Tensor, Tensor, Tensor)",
    fake=_fake_gradients,
    setup_context=_save_gradients,
    backward=_scale_gradients,
    flops=lambda hidden, weight, *_: 6 * hidden[0] * weight[0] * weight[1],
)
def _loss_and_gradients(
    hidden: Tensor, weight: Tensor, targets: Tensor, impl: str, *options_and_row_weights: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted sum of the losses, (), and its gradients: dhidden and dweight."""
    *options, row_weights = options_and_row_weights
    losses, dhidden, dweight = _by_chunks(
        hidden, weight, targets, impl, LossOptions(*options), row_weights, with_gradients=True
    )
    assert dhidden is not None and dweight is not None
    if row_weights is not None:
        losses = losses * row_weights
    return losses.sum(), dhidden, dweight
