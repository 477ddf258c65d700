"""Sharding of whole sequences over a group, and the calls that a group refuses."""

import pytest
import torch

from kernels import BlockSparseMask, ContextGroup, context_attention, flash_attention
from kernels.context import group as groups
from kernels.context.interface import _pick_method
from kernels.limits import MIN_RING_TOKENS
from kernels.mask.patterns import butterfly
from kernels.options import make_options
from kernels.testing import make_qkv


def fake_group(rank, size):
    """Group in which this process has rank `rank` of `size`, without other processes."""
    context = ContextGroup.__new__(ContextGroup)
    context.__dict__ |= {
        "process_group": None, "rank": rank, "size": size, "name": "nobody",
        "chunks": (rank, 2 * size - 1 - rank),
    }  # fmt: skip
    return context


def test_each_rank_has_an_early_and_a_late_chunk():
    x = torch.arange(24).view(1, 12, 2).repeat(2, 1, 1)
    expected = [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
    for rank, positions in enumerate(expected):
        context = fake_group(rank, 3)
        assert context.positions(4).tolist() == positions
        assert context.positions(4).dtype == torch.int64
        assert torch.equal(context.shard(x, 1), x[:, positions])
        assert torch.equal(context.shard(x.mT, -1), x.mT[:, :, positions])


def test_a_single_process_has_the_whole_sequence():
    context = ContextGroup()
    assert (context.rank, context.size, context.chunks) == (0, 1, (0, 1))
    x = torch.randn(2, 5)
    assert context.shard(x, 1) is x and context.unshard(x, 1) is x
    assert context.positions(5).tolist() == [0, 1, 2, 3, 4]
    qkv = make_qkv(1, 7, 7, 2, 2, 16)
    out = context_attention(*qkv, context=context, window_size=3, impl="reference")
    expected = flash_attention(*qkv, causal=True, window_size=3, impl="reference")
    assert torch.equal(out, expected)


def unshard_all(context):
    whole = torch.randn(2, 16, 3, generator=torch.Generator().manual_seed(0))
    for x, dim in ((whole, 1), (whole.mT, 2), (whole.mT.unsqueeze(0), -1)):
        part = context.shard(x, dim).requires_grad_()
        restored = context.unshard(part, dim)
        assert torch.equal(restored, x) and not restored.requires_grad
    assert groups.group_named(context.name) is context
    positions = context.unshard(context.positions(16 // context.size), 0)
    assert positions.tolist() == list(range(16))


@pytest.mark.distributed
def test_unshard_restores_the_sequence(processes):
    processes.call(unshard_all)


def test_the_ring_is_picked_for_long_sequences():
    def pick(tokens, **options):
        q = torch.empty(1, tokens, 1, 16, device="meta")
        return _pick_method(None, q, make_options(q, q, q, causal=True, **options))

    doc_start = torch.empty(1, MIN_RING_TOKENS, dtype=torch.int32, device="meta")
    assert pick(MIN_RING_TOKENS) == "ring"
    assert pick(MIN_RING_TOKENS, doc_start=doc_start, softcap=1.0) == "ring"
    assert pick(MIN_RING_TOKENS, mask=MASK) == "ring"
    assert pick(MIN_RING_TOKENS - 2) == "gather"
    assert pick(MIN_RING_TOKENS, window_size=9) == "gather"
    assert pick(MIN_RING_TOKENS, dropout_p=0.1, dropout_seed=1) == "gather"


MASK = BlockSparseMask(butterfly(4), 16)
REFUSED = {
    "causal": ({"causal": False}, "causal must be True .* got False"),
    "impl": ({"impl": "sdpa"}, r"impl must be None or one of \('hopper', 'triton', 'reference'\)"),
    "an impl that is not there": (
        {"impl": "hopper", "method": "ring"}, "impl='hopper' .* q.device=cpu must be an H100",
    ),
    "sinks": ({"sinks": torch.zeros(2)}, "sinks must be None"),
    "alibi_slopes": ({"alibi_slopes": torch.zeros(2)}, "alibi_slopes must be None"),
    "method": ({"method": "tree"}, "method must be None, 'ring' or 'gather', got 'tree'"),
    "window": ({"method": "ring", "window_size": 3}, "'ring' cannot .* not support window_size"),
    "padding": (
        {"method": "ring", "kv_lengths": torch.tensor([3])}, "it does not support kv_lengths",
    ),
    "dropout": (
        {"method": "ring", "dropout_p": 0.1, "dropout_seed": 1}, "it does not support dropout_p",
    ),
    "no seed": ({"dropout_p": 0.1}, "dropout_p=0.1 needs dropout_seed, the same in all processes"),
    "chunks of dropout": (
        {"dropout_p": 0.1, "dropout_seed": 1}, "multiple of 16 tokens, got 8: .* multiple of 64",
    ),
    "documents of whole sequences": (
        {"doc_start": torch.zeros(1, 32, dtype=torch.int32)}, "doc_start must have shape",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_argument_and_value(name):
    options, message = REFUSED[name]
    qkv = make_qkv(1, 16, 16, 2, 2, 8)
    with pytest.raises(ValueError, match=message):
        context_attention(*qkv, context=fake_group(0, 2), **options)


def test_odd_lengths_are_refused():
    context = fake_group(0, 2)
    with pytest.raises(ValueError, match="30 tokens cannot be split into 2 . 2 equal .* of 4"):
        context.shard(torch.zeros(1, 30), 1)
    for call in (
        lambda: context.positions(15),
        lambda: context_attention(*make_qkv(1, 15, 15, 1, 1, 8), context=context),
    ):
        with pytest.raises(ValueError, match="even number of tokens, .* 15: .* multiple of twice"):
            call()
    with pytest.raises(ValueError, match="q has 16, k 32"):
        context_attention(*make_qkv(1, 16, 32, 1, 1, 8), context=context)
