"""Attention sharded over processes against attention in one: outputs and gradients."""

import pytest
import torch
import torch.distributed as dist

from kernels import BlockSparseMask, ContextGroup, context_attention
from kernels.mask.patterns import butterfly, sliding_window
from kernels.reference.standard import standard_attention
from kernels.testing import make_qkv
from tests.kernels.context.whole import check_budget, results, whole_results

pytestmark = pytest.mark.distributed


def packed(*lengths):
    """doc_start of documents of these lengths, one after the other: (1, T)."""
    starts = torch.tensor([0, *lengths[:-1]]).cumsum(0)
    return starts.repeat_interleave(torch.tensor(lengths))[None]


def documents_of(tokens):
    """doc_start (B, T) by name, for chunks of 16 or of 8 tokens if T is 64."""
    quarter = tokens // 4
    at_borders = packed(quarter, quarter, tokens - 2 * quarter)
    within = packed(3, quarter, 1, tokens - quarter - 4)
    # the last document does not see the first chunks
    late = packed(tokens - quarter - 1, quarter + 1)
    one_each = packed(*[1] * tokens)
    in_no_order = torch.randint(
        0, tokens, (1, tokens), generator=torch.Generator().manual_seed(0), dtype=torch.int32
    )
    return {
        "documents at borders": at_borders,
        "documents within chunks": within.int(),
        "documents of one token": one_each,
        "a document that begins late": late,
        "other documents in each sample": torch.cat((within, late)),
        "documents in no order": in_no_order,
        "rows that see nothing": torch.where(in_no_order % 3 == 0, tokens, in_no_order),
        "nothing seen at all": torch.full((1, tokens), 2**40),
    }


DENSE = {
    "causal": {},
    "softcap": {"softcap": 1.5, "softmax_scale": 0.7},
    **{name: {"doc_start": starts} for name, starts in documents_of(64).items()},
    "documents and a cap": {"doc_start": packed(20, 25, 19), "softcap": 1.5},
}
MASK = BlockSparseMask(butterfly(8), 16)
OTHERS = {
    "a window within a chunk": {"window_size": 5},
    "a window of more than a chunk": {"window_size": 23},
    "a window of all": {"window_size": 100},
    "padding": {"kv_lengths": torch.tensor([0, 37])},
    "padding, documents": {"kv_lengths": torch.tensor([64]), "doc_start": packed(20, 44)},
    "window, documents": {"window_size": 19, "doc_start": packed(30, 34)},
}
# for 128 tokens, in chunks of 32 or 16
MASKED = {
    "butterfly": {"mask": MASK},
    "butterfly of each head": {
        "mask": BlockSparseMask(torch.stack([butterfly(8, n_factors=n) for n in (0, 1, 2, 3)]), 16)
    },
    "butterfly, documents": {"mask": MASK, "doc_start": packed(40, 88)},
    "butterfly, window": {"mask": MASK, "window_size": 50},
    "dropout": {"dropout_p": 0.3, "dropout_seed": 2**40 + 11},
    "dropout, butterfly": {"dropout_p": 0.3, "dropout_seed": torch.tensor([5]), "mask": MASK},
}


def batch_of(options):
    tensors = (options.get(name) for name in ("doc_start", "kv_lengths"))
    return max((len(x) for x in tensors if x is not None), default=1)


def check_exactly(processes, tokens, method, options, n_kv_head=2):
    sizes = (batch_of(options), tokens, tokens, 4, n_kv_head, 8)

    def attend(q, k, v, **options):
        return standard_attention(q, k, v, causal=True, **options)[0]

    expected = results(attend, make_qkv(*sizes, dtype=torch.float64), **options)
    options = {**options, "method": method, "impl": "reference"}
    for actual in processes.call(whole_results, sizes, torch.float64, options):
        for x, y in zip(actual, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-10)


@pytest.mark.parametrize("method", ["ring", "gather"])
@pytest.mark.parametrize("name", DENSE)
def test_dense(processes, method, name):
    check_exactly(processes, 64, method, DENSE[name])


@pytest.mark.parametrize("name", OTHERS)
def test_options_that_the_ring_does_not_support(processes, name):
    check_exactly(processes, 64, None, OTHERS[name])


@pytest.mark.parametrize("name", MASKED)
def test_masks_and_dropout(processes, name):
    check_exactly(processes, 128, None, MASKED[name], n_kv_head=4)


# each step of the ring uses a part of the mask; some parts are empty
BY_RING = {
    **{name: MASKED[name] for name in MASKED if "dropout" not in name and "window" not in name},
    "near": {"mask": BlockSparseMask(sliding_window(8, 1), 16)},
    "only what is far": {"mask": BlockSparseMask(~sliding_window(8, 3), 16)},
    "nothing at all": {"mask": BlockSparseMask(torch.zeros(8, 8, dtype=torch.bool), 16)},
    "all": {"mask": BlockSparseMask(torch.ones(8, 8, dtype=torch.bool), 16)},
}


@pytest.mark.parametrize("name", BY_RING)
def test_masks_by_the_ring(processes, name):
    check_exactly(processes, 128, "ring", BY_RING[name], n_kv_head=4)


@pytest.mark.parametrize("method", ["ring", "gather"])
@pytest.mark.parametrize("documents", [False, True], ids=["one document", "documents"])
def test_chunks_of_one_token(processes, method, documents):
    tokens = 2 * processes.size
    options = {"doc_start": packed(1, tokens - 1)} if documents else {}
    check_exactly(processes, tokens, method, options)


def under_autocast(context, method):
    """`results` under autocast of q and k in fp32 and v in bf16, and `results` of all in bf16."""
    qkv = make_qkv(1, 32, 32, 2, 2, 8, dtype=torch.float32)
    casts = [x.bfloat16() for x in qkv]

    def attend(q, k, v):
        return context_attention(q, k, v, context=context, method=method, impl="reference")

    with torch.autocast("cpu", torch.bfloat16):
        got = results(attend, (*qkv[:2], casts[2]))
    return got, results(attend, casts)


@pytest.mark.parametrize("method", ["ring", "gather"])
def test_autocast_casts_the_inputs(two, method):
    for got, (out, dq, dk, dv) in two.call(under_autocast, method):
        for a, b in zip(got, (out, dq.float(), dk.float(), dv), strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("tokens", [64, 65])
def test_a_window_of_all_tokens_is_ignored(two, tokens):
    check_exactly(two, 64, "ring", {"window_size": tokens})


def packed_results(context, sizes, options):
    """out and dqkv of views of one packed tensor (B, T / P, 3, H, D), unsharded."""
    qkv = torch.stack(make_qkv(*sizes, dtype=torch.float64), 2)

    def attend(qkv):
        return context_attention(*qkv.unbind(2), context=context, impl="reference", **options)

    generator = torch.Generator().manual_seed(1)
    dout = torch.randn(qkv[:, :, 0].shape, generator=generator).to(qkv)
    leaf = context.shard(qkv, 1).requires_grad_()
    out = attend(leaf)
    (grad,) = torch.autograd.grad(out, leaf, context.shard(dout, 1))
    return context.unshard(out, 1), context.unshard(grad, 1)


@pytest.mark.parametrize("method", ["ring", "gather"])
def test_views_of_a_packed_tensor(processes, method):
    sizes = (2, 32, 32, 2, 2, 8)
    qkv = torch.stack(make_qkv(*sizes, dtype=torch.float64), 2)

    def attend(qkv):
        return standard_attention(*qkv.unbind(2), causal=True)[0]

    expected = results(attend, [qkv])
    for actual in processes.call(packed_results, sizes, {"method": method}):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


def in_two_groups(context, sizes, options):
    """`whole_results` of two groups: ranks 0 and 2, and ranks 1 and 3."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]  # all processes must create both
    pair = ContextGroup(groups[context.rank % 2])
    assert (pair.rank, pair.size) == (context.rank // 2, 2)
    with pytest.raises(ValueError, match="process_group must include this process"):
        ContextGroup(groups[1 - context.rank % 2])
    return whole_results(pair, sizes, torch.float64, options)


@pytest.mark.parametrize("method", ["ring", "gather"])
def test_groups_side_by_side(four, method):
    sizes = (1, 32, 32, 2, 1, 8)

    def attend(q, k, v):
        return standard_attention(q, k, v, causal=True)[0]

    expected = results(attend, make_qkv(*sizes, dtype=torch.float64))
    for actual in four.call(in_two_groups, sizes, {"method": method, "impl": "reference"}):
        torch.testing.assert_close(tuple(actual), expected, rtol=0, atol=1e-10)


# The interpreter is slow: few tokens, and only cases where the reference cannot replace kernels.
KERNELS = {
    "causal": ("ring", {}),
    "documents": ("ring", {"doc_start": packed(9, 30, 25)}),
    "nothing seen": ("ring", {"doc_start": packed(9, 30, 25) + 20}),
    "window": ("gather", {"window_size": 20, "doc_start": packed(9, 30, 25)}),
    "dropout": ("gather", {"dropout_p": 0.3, "dropout_seed": 7}),
    "butterfly": ("gather", {"mask": BlockSparseMask(butterfly(4), 16)}),
    "butterfly by the ring": ("ring", {"mask": BlockSparseMask(butterfly(4), 16)}),
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_keep_to_the_error_budget(two, name):
    method, options = KERNELS[name]
    options = {**options, "causal": True, "method": method, "impl": "triton"}
    two.call(check_budget, (1, 64, 64, 2, 1, 16), torch.float32, options)


def test_kernels_of_four_processes(four):
    options = {"causal": True, "doc_start": packed(20, 44), "method": "ring", "impl": "triton"}
    four.call(check_budget, (1, 64, 64, 2, 1, 16), torch.float32, options)
