"""The kernels against standard attention: shapes, dtypes, strides and extreme scores.

Interpreted on the CPU in fp32 and fp16 (its bf16 products are wrong), compiled on a GPU. Options
besides q, k and v are in test_features.py and test_sparse.py.
"""

from functools import partial

import pytest
import torch

from kernels import flash_attention
from kernels.reference.standard import standard_attention
from kernels.testing import check_attention, make_qkv
from kernels.triton.operands import operand
from tests.kernels.grids import (
    CAUSAL_OR_FULL,
    causal_or_full,
    each_of,
    each_pair,
    each_value,
    in_bf16,
    on_gpu,
)

triton_attention = partial(flash_attention, impl="triton", return_lse=True)
assert_close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)

pytestmark = pytest.mark.usefixtures("copy_engines")
each_16_bit = pytest.mark.parametrize("dtype", [torch.float16, in_bf16])


@each_pair(seq=[1, 63, 65, 127, 128], causal=CAUSAL_OR_FULL)
def test_any_length(check, seq, causal, dtype):
    check(1, seq, seq, 2, 2, 32, dtype, causal=causal)


@each_value(lengths=[(128, 256), (128, 255), (255, 128), (256, 128)])
def test_lengths_of_whole_tiles(check, lengths, dtype):
    # without a causal mask, a kernel for whole tiles has no masked loop
    check(1, *lengths, 2, 1, 16, dtype, softcap=5.0)


@each_value(head_dim=[1, 3, 16, 40, 64, 80, 96, 128, 160, 256])
def test_any_head_dim(check, head_dim, dtype):
    check(1, 67, 67, 1, 1, head_dim, dtype, causal=True)


@each_pair(lengths=[(1, 70), (33, 100), (100, 33), (65, 64), (64, 65)])
def test_causal_aligns_at_the_bottom_right(check, lengths, dtype):
    check(1, *lengths, 2, 2, 16, dtype, causal=True)


@each_value(n_kv_head=[1, 2])
def test_grouped_queries(check, n_kv_head, dtype):
    check(2, 40, 50, 4, n_kv_head, 16, dtype, causal=True)


@pytest.mark.parametrize("scale", [20.0, 1e-3])
def test_extreme_logits(check, precise, scale):
    check(1, 65, 65, 1, 1, 64, precise, causal=True, scale=scale)


def test_softmax_scale(check, precise):
    check(1, 33, 33, 1, 1, 32, precise, causal=True, softmax_scale=0.5)


@each_pair(tie=[(40.0, 2), (40.0, 70), (-40.0, 70)], causal=CAUSAL_OR_FULL)
def test_rows_that_tie_at_the_maximum(device_for, attention, tie, causal, dtype):
    # Equal largest scores give probabilities that are exactly 1 before they are divided, and with
    # values of one sign their rounding does not average out (arXiv 2510.04212).
    score, tied = tie
    q, k, v = make_qkv(1, 70, 70, 2, 1, 16, dtype=dtype, device=device_for(dtype))
    q = q[:, :1].repeat(1, 70, 1, 1)
    k[:, -tied:] = q[:, :1, :1] * (score * 4 / q[0, 0, 0].square().sum())  # scores of head 0
    v = -v.abs()
    check_attention(attention, q, k, v, with_dlse=True, causal=causal)


@each_value()
def test_rows_without_keys_are_zero(device_for, attention, dtype):
    q, k, v = make_qkv(
        1, 70, 40, 1, 1, 16, dtype=dtype, device=device_for(dtype), requires_grad=True
    )
    out, lse = attention(q, k, v, causal=True)
    dq, dk, dv = torch.autograd.grad((out.sum(), lse[..., 30:].sum()), (q, k, v))
    assert (out[:, :30] == 0).all() and torch.isneginf(lse[..., :30]).all()
    assert (dq[:, :30] == 0).all()
    assert all(x.isfinite().all() and x.any() for x in (lse[..., 30:], dq, dk, dv))


def strided_qkv(name, dtype, device):
    """q, k and v with strides that models produce, none of them contiguous."""
    B, T, H, D = 2, 50, 3, 16

    def normal(*shape):
        return torch.randn(*shape, dtype=dtype, device=device)

    if name == "views of one projection":
        return normal(B, T, 3, H, D).unbind(2)
    if name == "heads first":
        return [normal(B, H, T, D).transpose(1, 2) for _ in range(3)]
    if name == "one head for all":
        return [normal(B, T, H, D), *(normal(B, T, 1, D).expand(B, T, H, D) for _ in range(2))]
    if name == "every other token":
        return [normal(B, 2 * T, H, D)[:, ::2] for _ in range(3)]
    if name == "padded":
        return [normal(B, T, H, D + 5)[..., :D] for _ in range(3)]
    assert name == "odd offset"
    return [normal(B, T, H, D + 8)[..., 1 : 1 + D] for _ in range(3)]


# Copy engines take 16-byte steps from 16-byte addresses; other tensors are read through pointers.
FOR_COPY_ENGINES = {
    "views of one projection": True,
    "heads first": True,
    "every other token": True,
    "one head for all": False,
    "padded": False,
    "odd offset": False,
}


@each_of(
    ["name", "dtype"],
    [(name, torch.float16) for name in FOR_COPY_ENGINES]
    + [(name, torch.float32) for name in ("views of one projection", "one head for all")],
    [(name, torch.bfloat16) for name in FOR_COPY_ENGINES],
)
def test_strides(device_for, attention, name, dtype):
    q, k, v = strided_qkv(name, dtype, device_for(dtype))
    for x in (k, v):
        assert not x.is_contiguous()
        assert has_descriptor(x) == (FOR_COPY_ENGINES[name] and has_copy_engine(x))
    check_attention(attention, q, k, v, causal=True, with_dlse=True)


def has_copy_engine(x):
    return x.element_size() == 2 and (x.is_cpu or torch.cuda.get_device_capability()[0] >= 9)


def has_descriptor(x):
    return not isinstance(operand(x, 16, 16, described=True), tuple)


@each_16_bit
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_one_operand_that_copy_engines_cannot_read(device_for, name, dtype):
    q, k, v = make_qkv(2, 50, 50, 3, 3, 16, dtype=dtype, device=device_for(dtype))
    assert has_descriptor(q) == has_copy_engine(q)
    odd = torch.randn(2, 50, 3, 24, dtype=dtype, device=q.device)[..., 1:17]
    assert not has_descriptor(odd)
    qkv = {"q": q, "k": k, "v": v, name: odd}
    check_attention(triton_attention, **qkv, causal=True, with_dlse=True)


@each_16_bit
def test_gradients_that_copy_engines_cannot_read(device_for, dtype):
    qkv = make_qkv(2, 50, 50, 3, 3, 16, dtype=dtype, device=device_for(dtype), requires_grad=True)
    out = flash_attention(*qkv, causal=True, impl="triton")
    dout = torch.randn(2, 50, 3, 24, dtype=dtype, device=out.device)[..., 1:17]
    assert not has_descriptor(dout)
    grads = torch.autograd.grad(out, qkv, dout, retain_graph=True)
    expected = torch.autograd.grad(out, qkv, dout.contiguous())
    for grad, want in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, want)


def test_gradients_of_any_strides(device_for):
    qkv = make_qkv(2, 50, 50, 3, 3, 16, device=device_for(torch.float32), requires_grad=True)
    out = flash_attention(*qkv, causal=True, impl="triton")
    expected = standard_attention(*qkv, causal=True)[0]
    one = torch.ones((), device=out.device)
    # a last dimension that is not contiguous; the gradient of a sum, with all strides 0
    for dout in (torch.randn(2, 3, 16, 50).permute(0, 3, 1, 2).to(one), one.expand(out.shape)):
        got = torch.autograd.grad(out, qkv, dout, retain_graph=True)
        want = torch.autograd.grad(expected, qkv, dout, retain_graph=True)
        assert_close(got, want)


@pytest.mark.parametrize("impl", ["triton", "sdpa", "reference"])
@causal_or_full
def test_implementations_agree(device_for, impl, causal):
    q, k, v = make_qkv(2, 45, 45, 2, 1, 16, device=device_for(torch.float32))
    expected = standard_attention(q, k, v, causal=causal, softmax_scale=0.3)[0]
    out = flash_attention(q, k, v, causal=causal, softmax_scale=0.3, impl=impl)
    assert_close(out, expected)


@pytest.mark.parametrize("option", ["causal", "dropout_p", "softcap"])
def test_gradients_through_lse_alone(device_for, option):
    q, k, v = make_qkv(1, 33, 33, 2, 1, 16, device=device_for(torch.float32), requires_grad=True)
    options = {"causal": True, "dropout_p": 0.3, "softcap": 2.0}
    options = {option: options[option], "dropout_seed": 3}
    lse = triton_attention(q, k, v, **options)[1]
    expected = standard_attention(q, k, v, **options)[1]
    dlse = torch.randn_like(lse)
    assert_close(
        torch.autograd.grad(lse, (q, k), dlse), torch.autograd.grad(expected, (q, k), dlse)
    )


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 128])
@causal_or_full
@pytest.mark.parametrize("seq", [1000, 4097])
def test_long_sequences(check, seq, causal, head_dim, dtype):
    check(1, seq, seq, 2, 1, head_dim, dtype, causal=causal)


@on_gpu
@causal_or_full
def test_longest_tiles(check, causal):
    # enough keys for the tiles that only long sequences use
    check(1, 300, 8200, 2, 2, 128, torch.bfloat16, causal=causal)
