"""Rows so far apart that their offsets pass 2^31 elements.

Each buffer spans 4.3 GB of addresses, of which a few rows are touched. A CPU allocates only the
touched pages, a GPU allocates all of it.
"""

import pytest
import torch

from kernels import flash_attention
from kernels.checks import MAX_ROW_STRIDE, rows_in_reach

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
HEAD_DIM = 64


def random_rows(n_rows, row_stride, device, n_tensors=1):
    """Tensors (1, n_rows, 1, HEAD_DIM) fp16, side by side in the rows of one buffer."""
    size = (n_rows - 1) * row_stride + n_tensors * HEAD_DIM
    packed = torch.empty(size, dtype=torch.float16, device=device)
    packed = packed.as_strided((1, n_rows, 1, n_tensors * HEAD_DIM), (size, row_stride, size, 1))
    packed.normal_()
    return packed.split(HEAD_DIM, dim=-1)


def results(q, k, v, dout):
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = flash_attention(q, k, v, causal=True, impl="triton")
    return out, *torch.autograd.grad(out, (q, k, v), dout)


def assert_same_as_contiguous(q, k, v, dout):
    expected = results(*(x.contiguous() for x in (q, k, v, dout)))
    names = ("out", "dq", "dk", "dv")
    for name, got, want in zip(names, results(q, k, v, dout), expected, strict=True):
        assert torch.equal(got, want), name
        assert want.any(), name


@pytest.mark.parametrize("device", DEVICES)
def test_tiles_start_past_2_to_the_31(device):
    # Tiles have at most 128 rows: at the largest stride allowed, one starts at 2^31 or later.
    seq_len = 2**31 // MAX_ROW_STRIDE + 2
    assert seq_len == 128 + 2
    assert_same_as_contiguous(*random_rows(seq_len, MAX_ROW_STRIDE, device, n_tensors=4))


@pytest.mark.parametrize("device", DEVICES)
def test_any_gradient_of_the_output(device):
    # Autograd chooses the strides of dout, not the caller. Row 32 passes 2^31 within a tile of 64.
    (dout,) = random_rows(34, 4 * MAX_ROW_STRIDE, device)
    assert not rows_in_reach(dout)
    q, k, v = torch.randn(3, 1, 34, 1, HEAD_DIM, dtype=torch.float16, device=device)
    assert_same_as_contiguous(q, k, v, dout)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_rows_out_of_reach_are_refused(name):
    near = torch.randn(1, 2, 1, HEAD_DIM, dtype=torch.float16)
    (far,) = random_rows(2, MAX_ROW_STRIDE + 1, "cpu")
    qkv = {"q": near, "k": near, "v": near, name: far}
    message = rf"at most 16777216 elements apart, and {name} has .*16777217.*\.contiguous\(\)"
    with pytest.raises(ValueError, match=message):
        flash_attention(**qkv, impl="triton")
    expected = flash_attention(**{key: x.contiguous() for key, x in qkv.items()}, impl="triton")
    torch.testing.assert_close(flash_attention(**qkv), expected, rtol=1e-2, atol=1e-3)


def test_rows_in_reach_counts_the_offsets_of_tiles():
    def meta(shape, stride):
        return torch.empty_strided(shape, stride, device="meta")

    assert rows_in_reach(meta((2, 128, 1, 64), (2**40, MAX_ROW_STRIDE, 2**40, 1)))
    assert not rows_in_reach(meta((2, 128, 1, 64), (2**40, MAX_ROW_STRIDE + 1, 2**40, 1)))
    # with one row there is no second row to reach
    assert rows_in_reach(meta((2, 1, 1, 64), (2**40, 2**40, 64, 1)))
    # heads expanded from one: the rows of q are near, those of its gradient are not
    assert not rows_in_reach(meta((1, 2, 2**18 + 1, 64), (128, 64, 0, 1)))


@pytest.mark.gpu
def test_results_past_2_to_the_31():
    # one head, expanded 2^18 times: inputs of a few kilobytes, and 2^31 elements in each result
    seq_len, n_head = 130, MAX_ROW_STRIDE // HEAD_DIM
    one = torch.randn(4, 1, seq_len, 1, HEAD_DIM, dtype=torch.float16, device="cuda")
    assert_all_heads_are_equal(one, one.expand(-1, -1, -1, n_head, -1))


@pytest.mark.gpu
def test_operands_past_2_to_the_31():
    # long enough to be read through TMA descriptors, and each head has memory of its own
    seq_len, n_head = 1024, 2**31 // (1024 * HEAD_DIM) + 1
    one = torch.randn(4, 1, seq_len, 1, HEAD_DIM, dtype=torch.float16, device="cuda")
    many = one.repeat(1, 1, 1, n_head, 1)
    assert many[0].numel() > 2**31
    assert_all_heads_are_equal(one, many)


def assert_all_heads_are_equal(one, many):
    expected = results(*one)
    for name, got, want in zip(("out", "dq", "dk", "dv"), results(*many), expected, strict=True):
        assert got.numel() > 2**31
        assert (got == want).all(), name
