"""Ring attention: keys and values rotate through the ranks, and each attends to those it holds.

At step i, rank r holds the keys of rank s = r - i (modulo P), which are chunks s and 2 P - 1 - s. A
causal mask leaves three cases, and a kernel needs at most a causal mask for each:

    s = r     own keys: causal, as the two chunks are in the order of the sequence
    s < r     all queries see all of the first chunk, and nothing of the second
    s > r     the second half of the queries sees all keys, the first half none

In the forward pass, the results of the steps are merged by their log-sum-exp. In the backward pass,
the keys rotate again, and the sums of their gradients follow one step behind. The sums start at
step 1. After step P - 1 they reach the owner of the keys, which adds the gradients of its step 0.
Each backward step takes the output and log-sum-exp of the whole row, so it recomputes the
probabilities of the whole row.

All sums have a fixed order, so repeated calls give the same bits. With a block-sparse mask, each
step has a part of it: the rows of its queries and the columns of its keys. A step without any block
passes the keys on and computes nothing.

Source: Ring Attention (arXiv 2310.01889), in the zig-zag order of kernels/context/group.py.

Letters in shapes: B batch, t = T / P tokens of a process, c = t / 2 of a chunk, H query heads, H_kv
key and value heads, D head_dim.
"""

import importlib
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..ops import module_of
from ..reference import partial
from ..registration import not_differentiable, operator
from .exchange import Exchange, post
from .group import ContextGroup, chunk_tokens, group_named
from .steps import RingOptions, masks_of, steps_of, visible_halves

_OPTIONS = "str impl, str group, float[] scores, Tensor[] mask_lists, int[] mask_sizes"


def _module(impl: str, backward: bool) -> ModuleType:
    """Module with attn_fwd or attn_bwd, which compute a step."""
    return partial if impl == "reference" else module_of(impl, backward)


def merge_module(impl: str) -> ModuleType:
    """Module with `merge`, which merges partial results; Triton is imported on first use."""
    name = "reference.partial" if impl == "reference" else "triton.merge"
    return importlib.import_module(f"..{name}", __package__)


def _sum_dtype(size: int, dtype: torch.dtype) -> torch.dtype:
    """Accumulation dtype of a ring of `size` ranks: fp32, or fp64 for fp64.

    Two partial results need no wider dtype: their sum is rounded only once in either case.
    """
    return dtype if size <= 2 else torch.promote_types(dtype, torch.float32)


class _RotatingKeys:
    """Keys and values that this rank holds now, and the exchange that brings the next ones."""

    def __init__(self, group: ContextGroup, own: Tensor) -> None:
        self._group, self.current, self._n_sent = group, own, 0
        self._exchange: Exchange | None = None

    def send(self) -> None:
        """Start to send the current keys to the next rank, except at the last step."""
        if self._n_sent < self._group.size - 1:
            # Two slots: keys are read from one while the next ones arrive in the other.
            self._exchange = post(self._group, self.current, self._n_sent % 2)
            self._n_sent += 1

    def receive(self) -> None:
        """Wait for the next keys, if there are any, and make them current."""
        if self._exchange is not None:
            self.current, self._exchange = self._exchange.wait(), None


# ---- registration


def _empty_lse(q: Tensor) -> Tensor:
    batch, n_local, n_head, _ = q.shape
    return q.new_empty((batch, n_head, n_local), dtype=torch.promote_types(q.dtype, torch.float32))


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, kv, doc_start, *ctx.options, mask_lists, ctx.mask_sizes = inputs
    ctx.save_for_backward(q, kv, *output, doc_start, *mask_lists)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Tensor | None, _: None) -> tuple[Any, ...]:
    tensors, mask_lists = ctx.saved_tensors[:5], ctx.saved_tensors[5:]
    # No gradients for the arguments after kv. PyTorch takes an empty list of sizes for a list of
    # tensors, so its gradient must be a list as well.
    last = None if mask_lists or ctx.mask_sizes else []
    others = None, *[None] * len(ctx.options), [None] * len(mask_lists), last
    if dout is None:
        return None, None, *others
    grads = ring_attn_bwd(dout, *tensors, *ctx.options, mask_lists, ctx.mask_sizes)
    return *grads, *others


def _flops(q_shape: tuple, kv_shape: tuple, doc_start_shape: tuple | None, *options: Any) -> int:
    """FLOPs of two matrix products over the visible pairs; without a mask, the same on each rank.

    Blocks of a mask count in full. Documents count as visible, because only the GPU knows them.
    """
    batch, n_local, n_head, head_dim = q_shape
    call, pairs = RingOptions(*options), 0
    c, ring = n_local // 2, group_named(call.group)
    masks = masks_of(call.mask_lists, call.mask_sizes, ring.size)
    for visible, mask in zip(visible_halves(ring), masks, strict=True):
        if mask is None:
            continue
        if "mask_rows" in mask:  # shapes, in place of the lists
            n_layouts, n_blocks = mask["mask_rows"][0], mask["mask_row_blocks"][0]
            pairs += n_blocks * n_head // n_layouts * mask["mask_block_size"] ** 2
        elif visible.causal:
            pairs += n_head * c * (2 * c + 1)
        else:
            pairs += n_head * len(visible.rows) * len(visible.keys) * c * c
    return 4 * batch * head_dim * pairs


# ---- the passes; `options` are the fields of RingOptions


@operator(
    "ring_attn_fwd",
    schema=f"(Tensor q, Tensor kv, Tensor? doc_start, {_OPTIONS}) -> (Tensor, Tensor)",
    fake=lambda q, *_: (q.new_empty(q.shape), _empty_lse(q)),
    setup_context=_setup_context,
    backward=_backward,
    flops=_flops,
)
def _ring_attn_fwd(
    q: Tensor, kv: Tensor, doc_start: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor]:
    """out (B, t, H, D) and lse (B, H, t) of q (B, t, H, D) and kv (2, B, t, H_kv, D); P > 1."""
    call = RingOptions(*options)
    ring, c = group_named(call.group), chunk_tokens(q.shape[1])
    sum_dtype = _sum_dtype(ring.size, q.dtype)
    attend = _module(call.impl, backward=False).attn_fwd
    merge = merge_module(call.impl).merge
    with torch.cuda.device_of(q), torch.autocast(q.device.type, enabled=False):
        rotating = _RotatingKeys(ring, kv.contiguous())
        out = lse = None
        for rows, keys, step_options in steps_of(ring, c, doc_start, call):
            # 1. Send before computing: the transfer overlaps with the kernels of this step. Ranks
            # that have nothing to compute send as well, because the next one needs the keys.
            rotating.send()
            # 2. Attend to the current keys, and merge with the earlier steps.
            if step_options is not None:
                k, v = rotating.current[:, :, keys].unbind()
                part, part_lse = attend(q[:, rows], k, v, step_options)
                if out is None or lse is None:  # step 0, whose rows are all rows
                    out, lse = part.to(sum_dtype), part_lse
                else:
                    merge(out[:, rows], lse[:, :, rows], part, part_lse)
            elif out is None:  # step 0 sees nothing
                out = q.new_zeros(q.shape, dtype=sum_dtype)
                lse = _empty_lse(q).fill_(-torch.inf)
            # 3. Make the stream wait for the next keys only now: this step's kernels need not.
            rotating.receive()
    assert out is not None and lse is not None
    return out.to(q.dtype), lse


@operator(
    "ring_attn_bwd",
    schema="(Tensor dout, Tensor q, Tensor kv, Tensor out, Tensor lse, Tensor? doc_start, "
    f"{_OPTIONS}) -> (Tensor, Tensor)",
    fake=lambda dout, q, kv, *_: (q.new_empty(q.shape), kv.new_empty(kv.shape)),
    backward=not_differentiable("context_attention has no second derivative"),
    # five matrix products, one of them the recomputation
    flops=lambda dout, q, kv, out, lse, *rest: 5 * _flops(q, kv, *rest) // 2,
)
def _ring_attn_bwd(
    dout: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, doc_start: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dq (B, t, H, D), and dk and dv in one tensor (2, B, t, H_kv, D)."""
    call = RingOptions(*options)
    ring, c = group_named(call.group), chunk_tokens(q.shape[1])
    sum_dtype = _sum_dtype(ring.size, q.dtype)
    backward = _module(call.impl, backward=True).attn_bwd
    with torch.cuda.device_of(q), torch.autocast(q.device.type, enabled=False):
        rotating = _RotatingKeys(ring, kv.contiguous())
        # Make contiguous copies once: otherwise the kernels would make them at each step. Steps
        # with the keys of a later rank use the second half of lse; the last rank has no such step.
        dout = dout.contiguous()
        late_lse = lse[:, :, c:].contiguous() if ring.rank < ring.size - 1 else lse
        dq = own = exchange = None
        for i, (rows, keys, step_options) in enumerate(steps_of(ring, c, doc_start, call)):
            # 1. Send before computing: the transfer overlaps with the kernels of this step.
            rotating.send()
            kv, has_pairs = rotating.current, step_options is not None
            part = torch.empty_like(q[:, rows], memory_format=torch.contiguous_format)
            kv_part = torch.empty_like(kv)
            # 2. Compute this step's part of dq, dk and dv.
            if step_options is not None:
                backward(
                    dout[:, rows], None, q[:, rows], *kv[:, :, keys].unbind(), out[:, rows],
                    late_lse if rows.start else lse, step_options,
                    (part, *kv_part[:, :, keys].unbind()),
                )  # fmt: skip
            # The parts of steps 0 and 1 become sums as a whole: keys that the step hides must be 0.
            if i < 2:
                kv_part[:, :, keys.stop if has_pairs else 0 :].zero_()
            # 3. Add to dq, which stays on this rank. So do dk and dv of step 0, its own keys.
            if dq is None:
                dq, own = (part if has_pairs else part.zero_()).to(sum_dtype), kv_part
            else:
                if has_pairs:
                    dq[:, rows] += part
                # 4. Receive the sums for the current keys from the previous rank, add this step's
                # part and send them on, one step behind their keys. Keys use slots 0 and 1, so sums
                # use 2 and 3.
                sums = kv_part.to(sum_dtype) if exchange is None else exchange.wait()
                if has_pairs and exchange is not None:
                    sums[:, :, keys] += kv_part[:, :, keys]
                exchange = post(ring, sums, 2 + i % 2)
            rotating.receive()
        assert dq is not None and own is not None and exchange is not None
        # The last exchange brings the sums for the keys of this rank.
        own += exchange.wait()
        return dq.to(q.dtype), own


ring_attn_fwd = torch.ops.papilio.ring_attn_fwd.default
ring_attn_bwd = torch.ops.papilio.ring_attn_bwd.default
