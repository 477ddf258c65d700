"""MLP with the GELU in the epilogue of a gemm: values and gradients, at the edges of tiles."""

import pytest
import torch

from kernels import hopper
from kernels.fused.gelu_mlp import gelu_mlp
from kernels.hopper import unsupported_linear
from tests.kernels.fused.test_gelu_mlp import (
    check_results,
    inputs,
    plain,
    results,
    without_bias,
)

on_gpu = pytest.mark.gpu


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    "shape",  # rows, width and inner width
    [
        (1, 8, 8),
        (129, 64, 136),  # one row and 8 columns more than a tile
        (300, 24, 264),  # depth less than one stage
        (257, 328, 128),  # more stages than the ring has, the last one with a depth of 8
        (5000, 72, 1000),  # more tiles than SMs
    ],
)
def test_values_and_gradients(shape, recompute, dtype):
    tensors = inputs(*shape, dtype=dtype, device="cuda")
    check_results(tensors, impl="hopper", recompute=recompute)


@on_gpu
def test_fp32_weights_are_as_exact_as_with_the_portable_kernels():
    x, *weights = inputs(700, 768, 3072, dtype=torch.bfloat16, device="cuda")
    tensors = [x, *(w.float() for w in weights)]
    exact = results(plain, [t.double() for t in tensors])
    actual, portable = (results(gelu_mlp, tensors, impl=impl) for impl in ("hopper", "triton"))
    for name, value in actual.items():
        assert value.dtype == portable[name].dtype
        assert (value - exact[name]).norm() <= 1.1 * (portable[name] - exact[name]).norm(), name


@on_gpu
@pytest.mark.parametrize("recompute", [False, True])
def test_no_bias_matches_a_bias_of_zero(recompute):
    x, w_in, b_in, w_out = inputs(300, 72, 264, dtype=torch.bfloat16, device="cuda")
    options = {"impl": "hopper", "recompute": recompute}
    expected = results(gelu_mlp, (x, w_in, b_in * 0, w_out), **options)
    actual = results(without_bias, (x, w_in, w_out), ("x", "w_in", "w_out"), **options)
    assert all(torch.equal(value, expected[name]) for name, value in actual.items())


@on_gpu
def test_recomputing_and_repeating_change_no_bit():
    tensors = inputs(3000, 256, 1024, dtype=torch.bfloat16, device="cuda")
    first = results(gelu_mlp, tensors, impl="hopper", recompute=True)
    for recompute in (True, False):
        again = results(gelu_mlp, tensors, impl="hopper", recompute=recompute)
        assert all(torch.equal(first[name], again[name]) for name in first)


@on_gpu
def test_nan_is_not_hidden():
    x, *weights = inputs(2, 64, 128, dtype=torch.bfloat16, device="cuda")
    x[0, 0] = float("nan")
    found = results(gelu_mlp, [x, *weights], impl="hopper")
    for name in ("y", "x"):
        assert found[name][0].isnan().all() and found[name][1].isfinite().all()


@on_gpu
def test_large_inputs_do_not_overflow():
    x = torch.tensor([-1e4, -40.0, -8.0, 8.0, 1e4], device="cuda", dtype=torch.bfloat16)
    x = x[:, None] * torch.eye(1, 8, device="cuda", dtype=torch.bfloat16)
    one, zero = torch.eye(8, device="cuda").bfloat16(), torch.zeros(8, device="cuda").bfloat16()
    actual = results(gelu_mlp, [x, one, zero, one], impl="hopper")
    expected = results(plain, [t.double() for t in (x, one, zero, one)])
    for name, value in actual.items():
        torch.testing.assert_close(value.double(), expected[name], rtol=0.02, atol=0.02, msg=name)


@on_gpu
def test_tensors_may_have_any_strides():
    """Padded rows, an expanded gradient and transposed weights: copies are made."""
    x, w_in, b_in, w_out = inputs(200, 64, 128, dtype=torch.bfloat16, device="cuda")
    strided = torch.empty(200, 65, device="cuda", dtype=torch.bfloat16)[:, :64].copy_(x)
    weights = w_in.T.contiguous().T, b_in, w_out.T.contiguous().T

    def gradients(x, *weights):
        leaves = [t.detach().requires_grad_() for t in (x, *weights)]
        return torch.autograd.grad(gelu_mlp(*leaves, impl="hopper").sum(), leaves)

    for actual, expected in zip(
        gradients(strided, *weights), gradients(x, w_in, b_in, w_out), strict=True
    ):
        assert torch.equal(actual, expected)


@on_gpu
def test_an_h100_uses_these_kernels():
    tensors = inputs(64, 64, 128, dtype=torch.bfloat16, device="cuda")
    assert torch.equal(gelu_mlp(*tensors), gelu_mlp(*tensors, impl="hopper"))


def test_unsupported_calls_name_a_reason(monkeypatch):
    x, w_in, b_in, w_out = inputs(4, 24, 261, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="x.device=cpu must be an H100 or H200"):
        gelu_mlp(x, w_in, b_in, w_out, impl="hopper")
    monkeypatch.setattr(hopper, "_is_hopper", lambda device: True)
    assert "x.dtype=torch.float32 must be" in unsupported_linear(x.float(), w_in)
    reason = unsupported_linear(x, w_in)
    assert "x.shape=(4, 24) must" in reason and "weight, (261, 24), must be multiples" in reason
    assert "at least one row" in unsupported_linear(x[:0], w_in[:256])
