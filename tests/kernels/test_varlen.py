"""Sequences in one tensor: padded in front to a batch, and back."""

import pytest
import torch
from torch import Tensor

from kernels import flash_attention
from kernels.flash_attn import flash_attn_varlen_func
from kernels.reference.standard import standard_attention
from kernels.testing import make_qkv
from kernels.varlen import Sequences
from tests.kernels.tensors import random_tensors


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def test_padded_sequences_have_results_and_lse_of_each_sequence():
    cu = offsets([5, 40, 19])
    sequences = Sequences(cu, cu, 64, 64, 40, 40, causal=False)

    def attention(q, k, v):
        q, k, v, starts, _ = sequences.batch(*(x[0] for x in (q, k, v)))
        out, lse = flash_attention(q, k, v, doc_start=starts, return_lse=True, impl="triton")
        return sequences.tokens(out)[None], sequences.lse_tokens(lse)[None]

    def each_sequence(q, k, v, **_):
        slices = [slice(a, b) for a, b in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True)]
        pairs = [standard_attention(*(x[:, s] for x in (q, k, v))) for s in slices]
        outs, lses = zip(*pairs, strict=True)
        return torch.cat(outs, 1), torch.cat(lses, 2)

    q, k, v = make_qkv(1, 64, 64, 2, 2, 16)
    for actual, expected in zip(attention(q, k, v), each_sequence(q, k, v), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_results_of_changed_offsets_are_not_reused():
    cu = offsets([7, 30])
    inputs = random_tensors([(37, 2, 16)] * 3, [torch.float32] * 3)
    flash_attn_varlen_func(*inputs, cu, cu, 37, 37, causal=True)
    cu[1] = 20
    out = flash_attn_varlen_func(*inputs, cu, cu, 37, 37, causal=True)
    fresh = cu.clone()
    assert torch.equal(out, flash_attn_varlen_func(*inputs, fresh, fresh, 37, 37, causal=True))


def test_padding_comes_before_each_sequence():
    cu = offsets([2, 3])
    sequences = Sequences(cu, cu, 5, 5, 4, 4, causal=False)
    x = torch.arange(1.0, 6.0).view(5, 1, 1)
    batch = sequences.batch(x, x, x)
    assert batch.q[..., 0, 0].tolist() == [[1, 1, 1, 2], [3, 3, 4, 5]]
    # the padding sees no key, and nobody sees the padding
    assert batch.doc_start.tolist() == [[4, 4, 2, 2], [4, 1, 1, 1]]
    assert torch.equal(sequences.tokens(batch.q), x)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", [[4, 5], [9]])
def test_tokens_after_the_last_sequence_change_nothing(causal, lengths):
    cu = offsets(lengths)
    leaves = [x.requires_grad_() for x in random_tensors([(12, 2, 16)] * 3, [torch.float32] * 3)]
    out = flash_attn_varlen_func(*leaves, cu, cu, 12, 12, causal=causal)
    alone = flash_attn_varlen_func(*[x[:9] for x in leaves], cu, cu, 9, 9, causal=causal)
    torch.testing.assert_close(out[:9], alone)
    grads = torch.autograd.grad(out[:9].sum(), leaves)
    expected = torch.autograd.grad(alone.sum(), leaves)
    torch.testing.assert_close(grads, expected)  # zero for the other tokens


def test_training_after_evaluation_on_the_same_sequences():
    cu, q = offsets([4, 5]), torch.randn(9, 2, 16, requires_grad=True)
    for causal in (True, False):
        with torch.inference_mode():
            flash_attn_varlen_func(q, q, q, cu, cu, 5, 5, causal=causal)
        sequences = Sequences(cu, cu, 9, 9, 5, 5, causal=causal)
        *qkv, starts, _ = sequences.batch(q, q, q)
        out = flash_attention(*qkv, causal=causal, doc_start=starts, impl="triton")
        assert torch.autograd.grad(out.sum(), q)[0].isfinite().all()


@pytest.mark.parametrize(("causal", "starts"), [(True, [0, 4, 9]), (False, [0, 4, 9])])
def test_transforms_of_functorch(causal, starts):
    cu = torch.tensor(starts, dtype=torch.int32)
    x = torch.randn(9, 2, 16)

    def loss(x):
        return flash_attn_varlen_func(x, x, x, cu, cu, 5, 5, causal=causal).square().sum()

    leaf = x.clone().requires_grad_()
    expected = torch.autograd.grad(loss(leaf), leaf)[0]
    torch.testing.assert_close(torch.func.grad(loss)(x), expected)


def test_nothing_to_attend_to_is_refused():
    x, cu = torch.randn(3, 2, 16), offsets([3])
    with pytest.raises(ValueError, match="k is empty"):
        flash_attn_varlen_func(x, x[:0], x[:0], cu, offsets([0]), 3, 1)


def test_padding_to_many_rows_is_refused():
    cu = offsets([1, 1, 30])
    Sequences(cu, cu, 32, 32, 30, 30, causal=False, max_rows=180)
    with pytest.raises(ValueError, match="64 tokens would be padded to 180 rows"):
        Sequences(cu, cu, 32, 32, 30, 30, causal=False, max_rows=179)
    assert Sequences(cu, cu, 32, 32, 30, 30, causal=True, max_rows=1).padding is None
