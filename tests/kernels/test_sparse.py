"""Block-sparse attention against standard attention with the layout expanded to elements."""

import itertools
from functools import partial

import pytest
import torch

from kernels import flash_attention
from kernels.mask.block_mask import BlockSparseMask
from kernels.mask.patterns import butterfly, random, sliding_window, strided
from kernels.reference.standard import dropout_keep_mask, visible_keys
from kernels.testing import check_attention, make_qkv
from tests.kernels.grids import (
    CAUSAL_OR_FULL,
    causal_or_full,
    each_of,
    each_pair,
    each_value,
    on_gpu,
)

triton_attention = partial(flash_attention, impl="triton", return_lse=True)

pytestmark = pytest.mark.usefixtures("copy_engines")


def blocks(n_q, n_k, *, n_head=1, density=0.5, seed=0):
    """A layout (n_head, n_q, n_k) of coin flips."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(n_head, n_q, n_k, generator=generator) < density


def with_empty_rows_and_columns(layout):
    layout = layout.clone()
    layout[..., 1, :] = False
    layout[..., 0] = False
    return layout


# For 70 tokens in blocks of 16, the last of which has 6.
LAYOUTS = {
    "butterfly": butterfly(5),
    "butterfly with globals": butterfly(5, n_factors=1, global_blocks=1),
    "sliding window": sliding_window(5, 2),
    "strided": strided(5, 2),
    "diagonal": torch.eye(5, dtype=torch.bool),
    "one for each head": torch.stack([random(5, 2, seed=head) for head in range(2)]),
    "all": torch.ones(5, 5, dtype=torch.bool),
    "nothing": torch.zeros(5, 5, dtype=torch.bool),
    "empty rows and columns": with_empty_rows_and_columns(butterfly(5)),
    "empty rows and columns of a head": torch.stack(
        [with_empty_rows_and_columns(butterfly(5)), sliding_window(5, 2)]
    ),
    "after the diagonal": torch.ones(5, 5, dtype=torch.bool).triu(1),
    "last query block": torch.arange(5).unsqueeze(1).expand(5, 5) == 4,
    "last key block": torch.arange(5).expand(5, 5) == 4,
}


@each_pair(name=list(LAYOUTS), causal=CAUSAL_OR_FULL)
def test_layouts(check, name, causal, dtype):
    mask = BlockSparseMask(LAYOUTS[name], 16)
    check(1, 70, 70, mask.n_head, mask.n_head, 16, dtype, causal=causal, mask=mask)


@each_value(blocks=[(16, 33), (32, 64), (64, 65), (128, 130), (256, 40), (256, 257)])
def test_block_sizes(check, blocks, dtype):
    # one head: tiles as large as a block, and several tiles within a block
    block_size, seq = blocks
    n = -(-seq // block_size)
    layout = torch.ones(n, n, dtype=torch.bool).tril()
    layout[-1, : n - 2] = False
    check(1, seq, seq, 1, 1, 16, dtype, causal=True, mask=BlockSparseMask(layout, block_size))


@each_value(head_dim=[40, 256, 128])
def test_head_dims(check, head_dim, dtype):
    mask = BlockSparseMask(butterfly(3), 32)
    check(1, 70, 70, 1, 1, head_dim, dtype, causal=True, mask=mask)


@each_pair(lengths=[(1, 65), (33, 100), (100, 33), (65, 70)], size=[32, 64], causal=CAUSAL_OR_FULL)
def test_different_numbers_of_queries_and_keys(check, lengths, size, causal, dtype):
    # A causal diagonal that does not start at a corner cuts two blocks of each row.
    seq_q, seq_k = lengths
    layout = blocks(-(-seq_q // size), -(-seq_k // size), density=0.7)
    mask = BlockSparseMask(layout, size)
    check(1, seq_q, seq_k, 1, 1, 16, dtype, causal=causal, mask=mask)


@each_of(["dtype"], [(torch.float32,)], [(torch.bfloat16,)])
def test_a_diagonal_that_cuts_two_blocks_of_a_column(check, dtype):
    # Tiles past the first block's diagonal must not skip rows of the blocks that follow, which are
    # not its neighbors. Padding makes all blocks partial; fp32 has tiles smaller than a block.
    layout = torch.tensor([[1, 1, 1], [0, 0, 1], [1, 1, 1]], dtype=torch.bool)
    mask = BlockSparseMask(torch.cat((layout, layout[:, :1]), dim=1), 64)
    kv_lengths = torch.tensor([192])
    check(1, 192, 193, 1, 1, 128, dtype, causal=True, mask=mask, kv_lengths=kv_lengths)


@each_pair(n_mask_head=[1, 4], causal=CAUSAL_OR_FULL)
def test_grouped_queries(check, n_mask_head, causal, dtype):
    # heads that share keys visit the columns of their own layouts, in one order
    mask = BlockSparseMask(blocks(3, 3, n_head=n_mask_head), 32)
    check(1, 70, 70, 4, 2, 16, dtype, causal=causal, mask=mask)


@each_pair(window_size=[None, 20], causal=CAUSAL_OR_FULL)
def test_an_all_true_mask_is_dense_attention(device_for, window_size, causal, dtype):
    mask = BlockSparseMask(torch.ones(2, 2, dtype=torch.bool), 64)
    qkv = make_qkv(1, 100, 100, 1, 1, 16, dtype=dtype, device=device_for(dtype), requires_grad=True)
    results = []
    for all_true in (None, mask):
        out, lse = triton_attention(*qkv, causal=causal, window_size=window_size, mask=all_true)
        results.append((out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), qkv)))
    # the same tiles, but full ones may be visited in another order
    torch.testing.assert_close(*results)


def documents(*lengths, repeat=1):
    """doc_start of documents of these lengths, one after the other: (repeat, T)."""
    starts = torch.tensor([0, *lengths[:-1]]).cumsum(0)
    return starts.repeat_interleave(torch.tensor(lengths)).int().repeat(repeat, 1)


# For 70 tokens, 2 samples and one head.
OPTIONS = {
    "window": {"window_size": 20},
    "causal window": {"causal": True, "window_size": 20},
    "causal window within a block": {"causal": True, "window_size": 3},
    "documents": {"causal": True, "doc_start": documents(5, 28, 37, repeat=2)},
    "documents in no order": {"doc_start": documents(5, 28, 37, repeat=2).flip(1)},
    "padding": {"kv_lengths": torch.tensor([0, 41])},
    "causal padding": {"causal": True, "kv_lengths": torch.tensor([64, 69])},
    "sinks": {"causal": True, "sinks": torch.tensor([0.5])},
    "softcap": {"softcap": 2.0},
    "all": {
        "causal": True, "window_size": 30, "doc_start": documents(5, 28, 37, repeat=2),
        "kv_lengths": torch.tensor([65, 30]), "sinks": torch.tensor([0.5]), "softcap": 2.0,
    },
}  # fmt: skip


@each_of(
    ["name", "dropout_p", "dtype"],
    [
        (name, dropout_p, dtype)
        for name in OPTIONS
        for dropout_p, dtype in ((0.0, torch.float32), (0.3, torch.float16))
        # sinks and softcap do not depend on blocks
        if dropout_p > 0 or name not in ("sinks", "softcap")
    ],
    itertools.product(OPTIONS, [0.0, 0.3], [torch.bfloat16]),
)
def test_combinations(check, name, dropout_p, dtype):
    layout = torch.tensor([[1, 0, 1], [0, 1, 1], [1, 1, 0]], dtype=torch.bool)
    options = {**OPTIONS[name], "dropout_p": dropout_p, "dropout_seed": 2**40 + 11}
    check(2, 70, 70, 1, 1, 16, dtype, mask=BlockSparseMask(layout, 32), **options)


@pytest.mark.parametrize(
    ("name", "causal"), [("butterfly", True), ("one for each head", False), ("all", True)]
)
def test_a_mask_does_not_change_what_dropout_keeps(device_for, causal, name):
    q, k, _ = make_qkv(1, 70, 70, 2, 2, 128, device=device_for(torch.float32))
    # if v holds the unit vectors, the output is the matrix of probabilities
    v = torch.eye(70, 128, device=q.device).view(1, 70, 1, 128).expand(1, 70, 2, 128)
    mask = BlockSparseMask(LAYOUTS[name], 16)
    dropout = {"dropout_p": 0.4, "dropout_seed": 7}
    p, _ = triton_attention(q, k, v, causal=causal, mask=mask, **dropout)
    sizes = {"batch": 1, "n_head": 2, "seq_q": 70, "seq_k": 70}
    kept = dropout_keep_mask(7, **sizes, dropout_p=0.4, device=q.device)
    visible = visible_keys(70, 70, causal=causal, mask=mask, device=q.device)
    assert torch.equal(p.transpose(1, 2)[..., :70] != 0, kept & visible)


def test_rows_and_columns_without_blocks_are_zero(device_for):
    qkv = make_qkv(1, 70, 70, 2, 2, 16, device=device_for(torch.float32), requires_grad=True)
    layout = torch.ones(5, 5, dtype=torch.bool)
    layout[1], layout[:, 3] = False, False
    out, lse = triton_attention(*qkv, mask=BlockSparseMask(layout, 16))
    assert (out[:, 16:32] == 0).all() and torch.isneginf(lse[..., 16:32]).all()
    others = torch.cat((lse[..., :16], lse[..., 32:]), dim=-1)
    assert others.isfinite().all()
    dq, dk, dv = torch.autograd.grad((out, others), qkv, (torch.ones_like(out), others))
    assert (dq[:, 16:32] == 0).all() and dq.any()
    assert (dk[:, 48:64] == 0).all() and dk.any()
    assert (dv[:, 48:64] == 0).all() and dv.any()


def test_a_mask_may_be_on_another_device_and_reused(check):
    mask = BlockSparseMask(butterfly(3), 32)
    for seq_q, seq_k, causal in ((65, 96, True), (96, 65, False), (96, 65, True), (65, 96, True)):
        check(1, seq_q, seq_k, 1, 1, 16, torch.float32, causal=causal, mask=mask)


@on_gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("seq", [1000, 4097])
@causal_or_full
@pytest.mark.parametrize("block_size", [16, 64, 128, 256])
def test_long_butterflies(check, block_size, causal, seq, head_dim):
    mask = BlockSparseMask(butterfly(-(-seq // block_size)), block_size)
    check(1, seq, seq, 2, 1, head_dim, torch.bfloat16, causal=causal, mask=mask)


@on_gpu
@pytest.mark.parametrize("name", OPTIONS)
def test_long_combinations(name):
    seq = 2000
    n_head = 1 if "sinks" in OPTIONS[name] else 2
    layouts = [random(16, 5, seed=head) | sliding_window(16, 2) for head in range(n_head)]
    mask = BlockSparseMask(torch.stack(layouts), 128)
    options = {
        **OPTIONS[name],
        **{
            "documents": {"doc_start": documents(300, 1, seq - 301)},
            "documents in no order": {"doc_start": documents(300, 1, seq - 301).flip(1)},
            "padding": {"kv_lengths": torch.tensor([777])},
            "causal padding": {"kv_lengths": torch.tensor([777])},
            "all": {
                "window_size": 300, "doc_start": documents(300, 1, seq - 301),
                "kv_lengths": torch.tensor([1800]),
            },
        }.get(name, {}),
        "dropout_p": 0.2,
        "dropout_seed": 5,
    }  # fmt: skip
    options = {k: x.cuda() if isinstance(x, torch.Tensor) else x for k, x in options.items()}
    q, k, v = make_qkv(1, seq, seq, n_head, 1, 64, dtype=torch.bfloat16, device="cuda")
    check_attention(triton_attention, q, k, v, with_dlse=True, mask=mask, **options)
