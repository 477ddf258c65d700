"""A linear layer against PyTorch's: values, gradients, and their dtypes."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from kernels.fused.linear import linear
from kernels.testing import assert_within_budget, poison_empty
from tests.kernels.tensors import each_dtype, random_tensors

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NAMES = ("x", "weight", "bias")


def inputs(n=37, width=24, out=40, *, dtype=torch.float32, weights=None, device="cpu"):
    shapes = (n, width), (out, width), (out,)
    scales = 1.0, width**-0.5, 1.0
    return random_tensors(shapes, [dtype, weights or dtype, weights or dtype], device, scales)


def results(function, tensors):
    """The output and the gradients of all tensors, for a random gradient of the output."""
    leaves = [t.detach().requires_grad_() for t in tensors if t is not None]
    y = function(*leaves)
    generator = torch.Generator().manual_seed(2)
    dy = (2 * torch.randint(2, y.shape, generator=generator) - 1).to(y)  # exact in any dtype
    return {"y": y.detach()} | dict(zip(NAMES, torch.autograd.grad(y, leaves, dy), strict=False))


@pytest.mark.parametrize("bias", [True, False])
@each_dtype
def test_values_and_gradients(dtype, device, bias):
    tensors = inputs(dtype=dtype, device=device)[: 2 + bias]
    with poison_empty():
        actual = results(linear, tensors)
    same_dtype, exact = results(F.linear, tensors), results(F.linear, [t.double() for t in tensors])
    for name, value in actual.items():
        assert value.dtype == dtype
        assert_within_budget(value, same_dtype[name], exact[name], factor=2.0, name=name)


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_weights_are_never_rounded(device):
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    tensors = inputs(dtype=dtype, weights=torch.float32, device=device)
    actual = results(linear, tensors)
    exact = results(
        F.linear, [t.double() for t in (tensors[0], *(w.to(dtype) for w in tensors[1:]))]
    )
    for name in NAMES[1:]:
        assert actual[name].dtype == torch.float32
        torch.testing.assert_close(actual[name].double(), exact[name], rtol=1e-3, atol=1e-3)
    rounded = actual["weight"].to(dtype).float()
    assert not torch.equal(actual["weight"], rounded)


@pytest.mark.parametrize("shape", [(), (3,), (0,), (2, 1, 5)])
def test_leading_dimensions(shape):
    x = torch.randn(*shape, 8)
    weight, bias = torch.randn(6, 8), torch.randn(6)
    torch.testing.assert_close(linear(x, weight, bias), F.linear(x, weight, bias))
    strided = torch.randn(*shape, 16)[..., ::2]
    torch.testing.assert_close(linear(strided, weight.clone()), F.linear(strided, weight))


def test_without_gradients_values_are_the_same():
    tensors = [t.requires_grad_() for t in inputs(dtype=torch.float16, weights=torch.float32)]
    with torch.no_grad():
        alone = linear(*tensors)
    assert torch.equal(alone, linear(*tensors)) and not alone.requires_grad


def test_autocast_chooses_the_dtype():
    tensors = inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, expected = linear(*tensors), F.linear(*tensors)
    assert y.dtype == torch.bfloat16 and torch.equal(y, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("autocast", [False, True])
def test_compiles_without_a_graph_break(autocast, device):
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager" if device == "cpu" else "inductor")
    compiled = torch.compile(linear, backend=counter, fullgraph=True)
    tensors = inputs(device=device)
    with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
        actual, expected = results(compiled, tensors), results(linear, tensors)
    for name, value in actual.items():
        torch.testing.assert_close(value, expected[name], msg=name)
    assert counter.frame_count == 1


@pytest.mark.parametrize("device", DEVICES)
def test_operators_are_well_registered(device):
    x, weight, bias = (t.requires_grad_() for t in inputs(device=device))
    for of_bias in (bias, None):
        torch.library.opcheck(torch.ops.papilio.linear.default, (x, weight, of_bias))
    backward = (torch.randn(37, 40, device=device), x.detach(), weight.detach())
    torch.library.opcheck(torch.ops.papilio.linear_bwd.default, backward)


def test_flops_match_the_gemms():
    tensors = [t.requires_grad_() for t in inputs()]
    with FlopCounterMode(display=False) as counter:
        linear(*tensors).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 37 * 24 * 40


def test_a_second_derivative_is_refused():
    tensors = [t.requires_grad_() for t in inputs()]
    (dx,) = torch.autograd.grad(linear(*tensors).sum(), tensors[0], create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        dx.sum().backward()


def test_errors_name_shapes():
    x, weight, bias = inputs()
    for tensors in ((x.T, weight, bias), (x, weight[0], bias), (x, weight, bias[1:])):
        with pytest.raises(ValueError, match=r"x must be \(\.\.\., C\), weight \(F, C\) and bias"):
            linear(*tensors)
