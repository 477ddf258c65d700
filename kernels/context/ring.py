"""Ring attention: keys and values go round, and each process attends to those that come by.

On rank r at step i, the keys are those of rank s = r - i (modulo P), its chunks s and 2 P - 1 - s.
Of a causal mask that leaves three cases, none of which needs more of a mask than a kernel has:

    s = r     the process's own: causal, as its two chunks lie one behind the other
    s < r     all queries see all of the first chunk, and nothing of the second
    s > r     the second half of the queries sees all keys, the first half none

What each step gives is merged by its log-sum-exp. In the backward pass the keys go round again, and
behind them the sums of their gradients: from the first rank that the keys come to, round and home,
where those of step 0 are added. A step starts from the output and the log-sum-exp of the whole,
which turn its scores into the probabilities of the whole. The next keys are on their way while a
step computes. Everything is added in one order: a repeated call gives the same bits.

Of a block-sparse mask each step has its part, the rows of these queries and the columns of these
keys; a step of which nothing is left passes the keys on and computes nothing.

Source: Ring Attention (arXiv 2310.01889), in the zig-zag order of kernels/context/group.py.

Letters in shapes: B batch, t = T / P tokens of a process, c = t / 2 of a chunk, H query heads, H_kv
key and value heads, D head_dim.
"""

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..ops import module_of
from ..reference import partial
from ..registration import not_differentiable, operator
from .exchange import Exchange, post
from .group import ContextGroup, chunk_tokens, group_named
from .steps import masks_of, meetings, steps_of

OPTIONS = (
    "str impl, str group, float softmax_scale, float softcap, Tensor[] mask_lists, int[] mask_sizes"
)


def _module(impl: str, backward: bool) -> ModuleType:
    """Who computes a step."""
    return partial if impl == "reference" else module_of(impl, backward)


def merge_module(impl: str) -> ModuleType:
    """Module whose `merge` adds up partial results; Triton is imported when first used."""
    if impl == "reference":
        return partial
    return importlib.import_module("..triton.merge", __package__)


def _sum_dtype(size: int, dtype: torch.dtype) -> torch.dtype:
    """Of what the steps of a group of this size add up: fp32, or fp64 for fp64.

    Two parts have one sum, which is rounded once, be it now or in the end.
    """
    return dtype if size <= 2 else torch.promote_types(dtype, torch.float32)


class _Keys:
    """The keys and values at hand, and the next ones."""

    def __init__(self, group: ContextGroup, own: Tensor) -> None:
        """With those of this rank."""
        self._group, self.at_hand = group, own
        self._n_sent = 0
        self._exchange: Exchange | None = None

    def send(self) -> None:
        """Pass on those at hand, unless all have come by."""
        if self._n_sent < self._group.size - 1:
            # what comes is read while the next ones come
            self._exchange = post(self._group, self.at_hand, self._n_sent % 2)
            self._n_sent += 1

    def receive(self) -> None:
        """Take the next ones, if there are any."""
        if self._exchange is not None:
            self.at_hand, self._exchange = self._exchange.wait(), None


# ---- what PyTorch is told of them


def _fake_fwd(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, n_local, n_head = q.shape[:3]
    dtype = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape), q.new_empty((batch, n_head, n_local), dtype=dtype)


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, kv, doc_start, *ctx.options, mask_lists, ctx.mask_sizes = inputs
    out, lse = output
    ctx.save_for_backward(q, kv, out, lse, doc_start, *mask_lists)
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Tensor | None, _: None) -> tuple[Any, ...]:
    *tensors, doc_start = ctx.saved_tensors[:5]
    mask_lists = ctx.saved_tensors[5:]
    # of each argument behind kv; PyTorch takes an empty list for one of tensors
    others = None, *[None] * len(ctx.options), [None] * len(mask_lists), None
    if not mask_lists:
        others = *others[:-1], None if ctx.mask_sizes else []
    if dout is None:
        return None, None, *others
    grads = ring_attn_bwd(dout, *tensors, doc_start, *ctx.options, mask_lists, ctx.mask_sizes)
    return *grads, *others


def _flops(
    q_shape: tuple,
    kv_shape: tuple,
    doc_start_shape: tuple | None,
    impl: str,
    group: str,
    softmax_scale: float,
    softcap: float,
    mask_lists: Sequence[tuple] = (),
    mask_sizes: Sequence[int] = (),
) -> int:
    """Two matrix products over the pairs that the masks leave; a dense one the same on each rank.

    Of documents it is known on the GPU only what they hide: it counts as visible. Blocks of a mask
    count whole.
    """
    batch, n_local, n_head, head_dim = q_shape
    c, ring = n_local // 2, group_named(group)
    pairs = 0
    masks = masks_of(mask_lists, mask_sizes, ring.size)  # pyright: ignore[reportArgumentType]
    for meeting, mask in zip(meetings(ring), masks, strict=True):
        if mask is None:
            continue
        if "mask_rows" in mask:
            n_layouts, n_blocks = mask["mask_rows"][0], mask["mask_row_blocks"][0]
            pairs += n_blocks * n_head // n_layouts * mask["mask_block_size"] ** 2
        elif meeting.causal:
            pairs += n_head * c * (2 * c + 1)
        else:
            pairs += n_head * len(meeting.rows) * len(meeting.keys) * c * c
    return 4 * batch * head_dim * pairs


# ---- the passes


@operator(
    "ring_attn_fwd",
    schema=f"(Tensor q, Tensor kv, Tensor? doc_start, {OPTIONS}) -> (Tensor, Tensor)",
    fake=_fake_fwd,
    setup_context=_setup_context,
    backward=_backward,
    flops=_flops,
)
def _ring_attn_fwd(
    q: Tensor,
    kv: Tensor,
    doc_start: Tensor | None,
    impl: str,
    group: str,
    softmax_scale: float,
    softcap: float,
    mask_lists: Sequence[Tensor],
    mask_sizes: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """out (B, t, H, D) and lse (B, H, t) of q (B, t, H, D) and kv (2, B, t, H_kv, D); P > 1."""
    ring = group_named(group)
    attend = _module(impl, backward=False).attn_fwd
    merge = merge_module(impl).merge
    with torch.cuda.device_of(q), torch.autocast(q.device.type, enabled=False):
        keys_here = _Keys(ring, kv.contiguous())
        out = lse = None
        steps = steps_of(
            ring, chunk_tokens(q.shape[1]), doc_start, softmax_scale, softcap,
            mask_lists, mask_sizes,
        )  # fmt: skip
        for rows, keys, options in steps:
            keys_here.send()
            if options is not None:
                part, part_lse = attend(
                    q[:, rows], *keys_here.at_hand[:, :, keys].unbind(), options
                )
                if out is None or lse is None:  # of the first step, whose rows are all
                    out, lse = part.to(_sum_dtype(ring.size, q.dtype)), part_lse
                else:
                    merge(out[:, rows], lse[:, :, rows], part, part_lse)
            elif out is None:
                out, lse = _nothing_seen(q, _sum_dtype(ring.size, q.dtype))
            keys_here.receive()
    assert out is not None and lse is not None
    return out.to(q.dtype), lse


def _nothing_seen(q: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """out, in `dtype`, and lse of queries that see no key."""
    batch, n_local, n_head, _ = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    lse = q.new_full((batch, n_head, n_local), -torch.inf, dtype=wide)
    return q.new_zeros(q.shape, dtype=dtype), lse


@operator(
    "ring_attn_bwd",
    schema="(Tensor dout, Tensor q, Tensor kv, Tensor out, Tensor lse, Tensor? doc_start, "
    f"{OPTIONS}) -> (Tensor, Tensor)",
    fake=lambda dout, q, kv, *_: (q.new_empty(q.shape), kv.new_empty(kv.shape)),
    backward=not_differentiable("context_attention has no second derivative"),
    # five matrix products, one of them the recomputation
    flops=lambda dout, q, kv, out, lse, *rest: 5 * _flops(q, kv, *rest) // 2,
)
def _ring_attn_bwd(
    dout: Tensor,
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    lse: Tensor,
    doc_start: Tensor | None,
    impl: str,
    group: str,
    softmax_scale: float,
    softcap: float,
    mask_lists: Sequence[Tensor],
    mask_sizes: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """dq (B, t, H, D), and dk and dv in one tensor (2, B, t, H_kv, D).

    The gradients of the keys that came in step i arrive in step i, too, but behind them: a rank
    passes them on when it has added its own. After step P - 1 they go home.
    """
    ring = group_named(group)
    backward = _module(impl, backward=True).attn_bwd
    sum_dtype = _sum_dtype(ring.size, q.dtype)
    c = chunk_tokens(q.shape[1])
    with torch.cuda.device_of(q), torch.autocast(q.device.type, enabled=False):
        keys_here = _Keys(ring, kv.contiguous())
        dout = dout.contiguous()  # the kernels would have one made at each step
        late_lse = lse[:, :, c:].contiguous() if ring.rank < ring.size - 1 else lse
        dq = own = exchange = None
        steps = steps_of(ring, c, doc_start, softmax_scale, softcap, mask_lists, mask_sizes)
        for i, (rows, keys, options) in enumerate(steps):
            keys_here.send()
            kv, sees = keys_here.at_hand, options is not None
            part = torch.empty_like(q[:, rows], memory_format=torch.contiguous_format)
            kv_part = torch.empty_like(kv)
            if options is not None:
                backward(
                    dout[:, rows],
                    None,
                    q[:, rows],
                    *kv[:, :, keys].unbind(),
                    out[:, rows],
                    late_lse if rows.start else lse,
                    options,
                    (part, *kv_part[:, :, keys].unbind()),
                )
            if i < 2:  # of these keys it is the first sum
                kv_part[:, :, keys.stop if sees else 0 :].zero_()
            if dq is None:
                dq, own = (part if sees else part.zero_()).to(sum_dtype), kv_part
            else:
                if sees:
                    dq[:, rows] += part
                if exchange is None:
                    sums = kv_part.to(sum_dtype)
                else:
                    sums = exchange.wait()
                    if sees:
                        sums[:, :, keys] += kv_part[:, :, keys]
                exchange = post(ring, sums, 2 + i % 2)
            keys_here.receive()
        assert dq is not None and own is not None and exchange is not None
        own += exchange.wait()
        return dq.to(q.dtype), own


ring_attn_fwd = torch.ops.papilio.ring_attn_fwd.default
ring_attn_bwd = torch.ops.papilio.ring_attn_bwd.default
