"""The tiled oracles against standard attention: the output, lse and every gradient."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.reference.standard import standard_attention
from kernels.reference.tiled import (
    flash_attention_1_backward,
    flash_attention_1_forward,
    flash_attention_2_backward,
    flash_attention_2_forward,
)
from kernels.testing import make_qkv, relative_error

# fp64: the oracles agree up to rounding, and a wrong term is far larger than this
assert_exact = partial(torch.testing.assert_close, rtol=0, atol=1e-11)
# (T_q, T_k): one token, T below, at and next to powers of two, either side longer, rows with no key
LENGTHS = [(1, 1), (7, 7), (31, 31), (32, 32), (33, 33), (7, 33), (33, 7), (1, 31), (31, 1)]

# A forward and its backward, given their tile sizes.
Oracle = tuple[Callable[..., Any], Callable[..., Any]]


def flash_attention_1(sram_floats: int) -> Oracle:
    tiles = {"sram_floats": sram_floats}
    return partial(flash_attention_1_forward, **tiles), partial(flash_attention_1_backward, **tiles)


def flash_attention_2(block_m: int, block_n: int) -> Oracle:
    tiles = {"block_m": block_m, "block_n": block_n}
    return partial(flash_attention_2_forward, **tiles), partial(flash_attention_2_backward, **tiles)


each_oracle = pytest.mark.parametrize(
    "oracle", [flash_attention_1(100), flash_attention_2(8, 5)], ids=["1", "2"]
)


def check(
    oracle: Oracle, q: Tensor, k: Tensor, v: Tensor, *, with_dlse: bool = False, **options: Any
) -> None:
    """Compare with `standard_attention`; with_dlse: also with a gradient through lse."""
    forward, backward = oracle
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    expected_out, expected_lse = standard_attention(*leaves, **options)
    out, lse = forward(q, k, v, **options)
    assert_exact((out, lse), (expected_out.detach(), expected_lse.detach()))

    generator = torch.Generator().manual_seed(1)
    dout, dlse = (torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in (out, lse))
    expected = torch.autograd.grad(expected_out, leaves, dout, retain_graph=True)
    assert_exact(backward(q, k, v, out, lse, dout, **options), expected)
    if with_dlse:
        expected = torch.autograd.grad((expected_out, expected_lse), leaves, (dout, dlse))
        assert_exact(backward(q, k, v, out, lse, dout, dlse=dlse, **options), expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sram_floats", [90, 150, 700])  # B_c = 3, 5, 22; B_r = 3, 5, 8
@pytest.mark.parametrize(("seq_q", "seq_k"), LENGTHS)
def test_flash_attention_1_is_standard_attention(
    seq_q: int, seq_k: int, sram_floats: int, causal: bool
) -> None:
    qkv = make_qkv(2, seq_q, seq_k, 4, 2, 8, dtype=torch.float64)
    check(flash_attention_1(sram_floats), *qkv, causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("block_m", "block_n"), [(3, 4), (16, 5), (7, 16), (64, 64)])
@pytest.mark.parametrize(("seq_q", "seq_k"), LENGTHS)
def test_flash_attention_2_is_standard_attention(
    seq_q: int, seq_k: int, block_m: int, block_n: int, causal: bool
) -> None:
    qkv = make_qkv(2, seq_q, seq_k, 4, 2, 8, dtype=torch.float64)
    check(flash_attention_2(block_m, block_n), *qkv, with_dlse=True, causal=causal)


SHAPES = st.fixed_dictionaries(
    {
        "batch": st.integers(1, 2),
        "seq_q": st.integers(1, 40),
        "seq_k": st.integers(1, 40),
        "n_kv_head": st.integers(1, 2),
        "head_dim": st.integers(1, 9),
        "seed": st.integers(0, 2**32),
    }
)
OPTIONS = st.fixed_dictionaries(
    {
        "causal": st.booleans(),
        "softmax_scale": st.none() | st.floats(0.01, 3),
        "dropout_p": st.sampled_from([0.0, 0.2, 0.9]),
        "dropout_seed": st.integers(0, 2**63 - 1),
    }
)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    shape=SHAPES,
    options=OPTIONS,
    group=st.integers(1, 3),
    sram_floats=st.integers(20, 400),
    block_m=st.integers(1, 20),
    block_n=st.integers(1, 20),
)
def test_oracles_agree_on_any_shape(
    shape: dict[str, Any],
    options: dict[str, Any],
    group: int,
    sram_floats: int,
    block_m: int,
    block_n: int,
) -> None:
    qkv = make_qkv(**shape, n_head=group * shape["n_kv_head"], dtype=torch.float64)
    check(flash_attention_1(sram_floats), *qkv, **options)
    check(flash_attention_2(block_m, block_n), *qkv, with_dlse=True, **options)


@pytest.mark.parametrize("causal", [False, True])
def test_oracles_share_one_dropout(causal: bool) -> None:
    qkv = make_qkv(2, 37, 43, 4, 2, 8, dtype=torch.float64)
    options: dict[str, Any] = {"causal": causal, "dropout_p": 0.3, "dropout_seed": 2**35 + 9}
    check(flash_attention_1(150), *qkv, **options)
    check(flash_attention_2(16, 5), *qkv, with_dlse=True, **options)


@each_oracle
def test_no_keys_at_all(oracle: Oracle) -> None:
    q, k, v = make_qkv(1, 4, 0, 2, 1, 8, dtype=torch.float64)
    forward, _ = oracle
    out, lse = forward(q, k, v)
    assert torch.equal(out, torch.zeros_like(q))
    assert (lse == -math.inf).all()


@each_oracle
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_and_shapes(oracle: Oracle, dtype: torch.dtype) -> None:
    q, k, v = make_qkv(2, 5, 9, 4, 2, 8, dtype=dtype)
    forward, backward = oracle
    out, lse = forward(q, k, v)
    assert (out.shape, out.dtype) == ((2, 5, 4, 8), dtype)
    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    assert (lse.shape, lse.dtype) == ((2, 4, 5), lse_dtype)
    grads = backward(q, k, v, out, lse, torch.ones_like(out))
    for grad, x in zip(grads, (q, k, v), strict=True):
        assert (grad.shape, grad.dtype) == (x.shape, dtype)


@each_oracle
def test_mismatched_inputs_are_refused(oracle: Oracle) -> None:
    q, k, v = make_qkv(2, 5, 9, 4, 2, 8)
    forward, _ = oracle
    with pytest.raises(ValueError, match="one shape"):
        forward(q, k[..., :4], v[..., :4])
    with pytest.raises(ValueError, match="dropout_seed"):
        forward(q, k, v, dropout_p=0.1)


@each_oracle
@pytest.mark.parametrize("causal", [False, True])
def test_large_logits_stay_finite(oracle: Oracle, causal: bool) -> None:
    # scores of several thousand: exp of one overflows even fp64, and most of P underflows
    q, k, v = make_qkv(1, 33, 33, 2, 2, 8, dtype=torch.float32, scale=50.0)
    expected_out, expected_lse = standard_attention(
        q.double(), k.double(), v.double(), causal=causal
    )
    assert expected_lse.max() > 1000
    forward, backward = oracle
    out, lse = forward(q, k, v, causal=causal)
    # fp32 scores of 10^4 are off by 10^-3, and so is their softmax
    assert relative_error(out, expected_out) < 1e-3
    assert relative_error(lse, expected_lse) < 1e-6
    grads = backward(q, k, v, out, lse, torch.ones_like(out), causal=causal)
    assert all(grad.isfinite().all() for grad in grads)
