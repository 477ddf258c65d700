"""`context_attention` as a function of whole sequences, to compare it with attention."""

import torch

from kernels import context_attention
from kernels.reference.standard import standard_attention
from kernels.testing import check_attention, make_qkv, poison_empty


class _Whole(torch.autograd.Function):
    """Shard the inputs, attend in each process and unshard the results."""

    @staticmethod
    def forward(ctx, attend, context, q, k, v):
        with torch.enable_grad():
            shards = [context.shard(x.detach(), 1).requires_grad_() for x in (q, k, v)]
            out = attend(*shards)
        ctx.context, ctx.shards, ctx.out = context, shards, out
        return context.unshard(out.detach(), 1)

    @staticmethod
    def backward(ctx, dout):
        grads = torch.autograd.grad(ctx.out, ctx.shards, ctx.context.shard(dout, 1))
        assert [x.dtype for x in grads] == [x.dtype for x in ctx.shards]
        return None, None, *(ctx.context.unshard(x, 1) for x in grads)


def whole_attention(context, q, k, v, *, doc_start=None, **options):
    """out (B, T, H, D) for whole q, k and v, differentiable."""
    if doc_start is not None:
        options["doc_start"] = context.shard(doc_start, 1)

    def attend(q, k, v):
        return context_attention(q, k, v, context=context, **options)

    return _Whole.apply(attend, context, q, k, v)


def results(attend, qkv, **options):
    """out, dq, dk and dv."""
    leaves = [x.detach().requires_grad_() for x in qkv]
    out = attend(*leaves, **options)
    generator = torch.Generator().manual_seed(1)
    dout = torch.randn(out.shape, generator=generator).to(out)
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


def device_of(context, kind):
    return torch.device(kind, context.rank) if kind == "cuda" else torch.device(kind)


def on_device(options, device):
    return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}


def whole_results(context, sizes, dtype, options, device="cpu", repeats=1):
    """`results` of whole_attention on random q, k and v; repeats must have equal bits."""
    device = device_of(context, device)
    qkv = make_qkv(*sizes, dtype=dtype, device=device)
    options = on_device(options, device)

    def attend(q, k, v, **options):
        return whole_attention(context, q, k, v, **options)

    with poison_empty():
        first = results(attend, qkv, **options)
        for _ in range(repeats):
            again = results(attend, qkv, **options)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    return [x.cpu() for x in first]


def check_budget(context, sizes, dtype, options, device="cpu"):
    """Check the error budget of `kernels.testing`; returns the relative errors."""
    device = device_of(context, device)
    named = {name: options[name] for name in ("method", "impl")}
    options = {name: x for name, x in on_device(options, device).items() if name not in named}

    def attend(q, k, v, **options):
        out = whole_attention(context, q, k, v, **options, **named)
        with torch.no_grad():  # context_attention does not return it
            lse = standard_attention(*(x.float() for x in (q, k, v)), **options)[1]
        return out, lse

    with poison_empty():
        return check_attention(attend, *make_qkv(*sizes, dtype=dtype, device=device), **options)
