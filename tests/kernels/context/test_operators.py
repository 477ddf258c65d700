"""Registration of the operators of a group: schema, fake, torch.compile and FLOP counts."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

from kernels import BlockSparseMask, context_attention, flash_attention
from kernels.context.gather import gather_kv, scatter_dkv
from kernels.context.ring import ring_attn_bwd, ring_attn_fwd
from kernels.context.steps import packed_masks
from kernels.mask.patterns import butterfly
from kernels.options import AttentionOptions, with_mask
from kernels.testing import make_qkv
from tests.kernels.context.whole import device_of, on_device

pytestmark = pytest.mark.distributed

DOC_START = (torch.arange(64) // 21 * 21)[None]
MASK = BlockSparseMask(butterfly(4), 16)
DIAGONAL = BlockSparseMask(torch.eye(2, dtype=torch.bool), 16)
COMPILED = {
    "ring": {"method": "ring"},
    "ring, documents": {"method": "ring", "doc_start": DOC_START, "softcap": 2.0},
    "ring, mask": {"method": "ring", "mask": MASK, "doc_start": DOC_START},
    "gather": {"method": "gather", "doc_start": DOC_START, "window_size": 20},
    "gather, mask and dropout": {
        "mask": MASK, "dropout_p": 0.2, "dropout_seed": torch.tensor([5]),
    },
}  # fmt: skip


def shard_of(context, qkv, options):
    options = {
        name: context.shard(x, 1) if name == "doc_start" else x for name, x in options.items()
    }
    return [context.shard(x.detach(), 1) for x in qkv], options


def compile_and_compare(context, name, device="cpu", backend="aot_eager", impl="reference"):
    """Compare a compiled function with eager mode; returns how often it was compiled."""
    device = device_of(context, device)
    qkv = make_qkv(1, 64, 64, 2, 2, 16, device=device)
    qkv, options = shard_of(context, qkv, on_device(COMPILED[name], device))
    packed = torch.stack(qkv, 2).requires_grad_()  # (B, T / P, 3, H, D): views that need a gradient
    dout = torch.randn_like(qkv[0])

    def attend(packed):
        q, k, v = packed.unbind(2)
        return context_attention(q, k, v, context=context, impl=impl, **options).sin()

    torch.compiler.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(attend, fullgraph=True, backend=counter)
    for function in (compiled, compiled):
        actual, expected = function(packed), attend(packed)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
        grads = [torch.autograd.grad(out, packed, dout) for out in (actual, expected)]
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)
    return counter.frame_count


@pytest.mark.parametrize("name", COMPILED)
def test_compiles_without_a_graph_break(two, name):
    assert two.call(compile_and_compare, name) == [1, 1]


def check_registration(context):
    qkv = make_qkv(1, 64, 64, 2, 1, 16, requires_grad=True)
    (q, k, v), _ = shard_of(context, qkv, {})
    q, kv = leaves = [x.requires_grad_() for x in (q, torch.stack((k, v)))]
    doc_start = context.shard(DOC_START.int(), 1)
    options = ("reference", context.name, [0.3, 2.0], [], [])
    mask_args = packed_masks([with_mask(AttentionOptions(causal=True), DIAGONAL, q, k, ""), None])
    for starts in (None, doc_start):
        torch.library.opcheck(ring_attn_fwd, (*leaves, starts, *options))
        torch.library.opcheck(ring_attn_fwd, (*leaves, starts, *options[:-2], *mask_args))
    out, lse = (x.detach() for x in ring_attn_fwd(*leaves, doc_start, *options))
    inputs = (torch.randn_like(out), q.detach(), kv.detach(), out, lse, doc_start, *options)
    torch.library.opcheck(ring_attn_bwd, inputs)
    k, v = (x.requires_grad_() for x in (k, v))
    torch.library.opcheck(gather_kv, (k, v, context.name))
    grads = [torch.randn_like(x) for x in gather_kv(k, v, context.name)]
    torch.library.opcheck(scatter_dkv, (*grads, context.name))


def test_operators_are_well_registered(two):
    two.call(check_registration)


def refuse_second_derivative(context, method):
    (q, k, v), _ = shard_of(context, make_qkv(1, 16, 16, 1, 1, 8), {})
    k.requires_grad_()
    out = context_attention(q, k, v, context=context, method=method, impl="reference")
    (dk,) = torch.autograd.grad(out.sum(), k, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        dk.sum().backward()


@pytest.mark.parametrize("method", ["ring"])
def test_a_second_derivative_is_refused(two, method):
    two.call(refuse_second_derivative, method)


def count_flops(context, method):
    """FLOPs of the forward pass and of the backward pass."""
    shards, _ = shard_of(context, make_qkv(2, 64, 64, 4, 2, 16), {})
    leaves = [x.to("meta").requires_grad_() for x in shards]
    with FlopCounterMode(display=False) as forward:
        out = context_attention(*leaves, context=context, method=method, impl="triton")
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("method", ["ring", "gather"])
def test_flops_are_split_evenly(processes, method):
    qkv = make_qkv(2, 64, 64, 4, 2, 16, device="meta")
    with FlopCounterMode(display=False) as counter:
        flash_attention(*qkv, causal=True, impl="triton")
    share = counter.get_total_flops() // processes.size
    assert processes.call(count_flops, method) == [(share, 5 * share // 2)] * processes.size
