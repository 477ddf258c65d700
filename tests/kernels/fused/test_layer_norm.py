"""Residual addition and normalisation: values, every gradient, and dtypes under autocast."""

from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from kernels.fused.layer_norm import add_layer_norm, add_rms_norm
from kernels.testing import assert_within_budget, poison_empty
from tests.kernels.tensors import each_dtype, random_tensors

on_gpu = pytest.mark.gpu
DEVICES = ["cpu", pytest.param("cuda", marks=on_gpu)]
NAMES = ("x", "y", "bias", "weight", "norm_bias")


@pytest.fixture(params=["triton", "reference"])
def impl(request):
    return request.param


def inputs(n=37, width=48, *, dtype=torch.float32, device="cpu", parameters=None):
    """The residual stream, a branch to add, and parameters, which may have another dtype."""
    shapes = (n, width), (n, width), (width,), (width,), (width,)
    return random_tensors(shapes, [dtype, dtype, *[parameters or dtype] * 3], device)


def plain(x, y, bias, weight, norm_bias, eps=1e-5):
    s = x + (y + bias)
    return s, F.layer_norm(s, weight.shape, weight, norm_bias, eps)


def plain_rms(x, y, bias, weight, eps=1e-6):
    s = x + (y + bias)
    return s, s / (s.square().mean(-1, keepdim=True) + eps).sqrt() * weight


norms = pytest.mark.parametrize(
    ("norm", "plain", "n"),
    [(add_layer_norm, plain, 5), (add_rms_norm, plain_rms, 4)],
    ids=["layer_norm", "rms_norm"],
)
"""A normalisation, the same in PyTorch, and the number of tensors that it takes."""


def results(function, tensors, names=NAMES, **options):
    """Both outputs and all gradients, for random gradients of the outputs."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    outputs = function(*leaves, **options)
    generator = torch.Generator().manual_seed(2)
    signs = [torch.randint(2, t.shape, generator=generator) for t in outputs]
    grads = [(2 * sign - 1).to(t) for sign, t in zip(signs, outputs, strict=True)]
    leaf_grads = torch.autograd.grad(outputs, leaves, grads)
    named = dict(zip(names[: len(leaves)], leaf_grads, strict=True))
    return {"s": outputs[0].detach(), "n": outputs[1].detach()} | named


@each_dtype
@norms
def test_values_and_gradients(norm, plain, n, impl, dtype, device):
    tensors = inputs(dtype=dtype, device=device)[:n]
    with poison_empty():
        actual = results(norm, tensors, impl=impl)
    same_dtype, exact = results(plain, tensors), results(plain, [x.double() for x in tensors])
    for name, value in actual.items():
        assert value.dtype == dtype
        assert_within_budget(value, same_dtype[name], exact[name], factor=2.0, name=name)


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (5, 1), (3, 1030)])
@norms
def test_odd_shapes(norm, plain, n, impl, shape):
    tensors = inputs(*shape)[:n]
    actual, expected = results(norm, tensors, impl=impl), results(plain, tensors)
    for name, value in actual.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-4, msg=name)


@on_gpu
@pytest.mark.parametrize("width", [768, 1600, 8192])
@norms
def test_model_widths(norm, plain, n, width):
    tensors = inputs(3000, width, dtype=torch.bfloat16, parameters=torch.float32, device="cuda")
    exact = results(plain, [x.double() for x in tensors[:n]])
    actual = results(norm, tensors[:n], impl="triton")
    for name in NAMES[:n]:
        assert actual[name].dtype == tensors[NAMES.index(name)].dtype
        error = (actual[name] - exact[name]).norm() / exact[name].norm()
        assert error < 5e-3, name


def test_no_rows_and_leading_dimensions(impl):
    x, y, *parameters = inputs(n=12)
    s, n = add_layer_norm(x.view(3, 4, 48), y.view(3, 4, 48), *parameters, impl=impl)
    assert s.shape == n.shape == (3, 4, 48)
    flat = add_layer_norm(x, y, *parameters, impl=impl)
    assert torch.equal(s.flatten(0, 1), flat[0]) and torch.equal(n.flatten(0, 1), flat[1])
    assert add_layer_norm(x[:0], y[:0], *parameters, impl=impl)[1].shape == (0, 48)


def test_without_gradients_values_are_the_same(impl):
    for parameters in (None, torch.float32):
        tensors = inputs(dtype=torch.float16, parameters=parameters)
        with torch.no_grad():
            alone = add_layer_norm(*tensors, impl=impl)
        leaves_with_grad = [t.requires_grad_() for t in tensors]
        torch.testing.assert_close(alone, add_layer_norm(*leaves_with_grad, impl=impl))


def test_without_a_branch_or_without_its_bias(impl):
    x, y, _, *norm = inputs()
    for streams, added in (((x,), ()), ((x, y), (y,))):
        leaves = [t.detach().requires_grad_() for t in (*streams, *norm)]
        stream, branch = leaves[0], leaves[1] if added else None
        s, n = add_layer_norm(stream, branch, None, *leaves[-2:], impl=impl)
        expected = [t.detach().requires_grad_() for t in (*streams, *norm)]
        s_plain = sum(expected[:-2])
        n_plain = F.layer_norm(s_plain, (48,), *expected[-2:])
        torch.testing.assert_close((s, n), (s_plain, n_plain))
        grads = torch.autograd.grad((s.sum() + n.square().sum()), leaves)
        torch.testing.assert_close(
            grads, torch.autograd.grad(s_plain.sum() + n_plain.square().sum(), expected)
        )


def test_without_a_norm_bias(impl):
    x, y, bias, weight, _ = (t.requires_grad_() for t in inputs())
    actual = add_layer_norm(x, y, bias, weight, None, impl=impl)
    expected = plain(x, y, bias, weight, None)
    torch.testing.assert_close(actual, expected)
    leaves = x, y, bias, weight
    grads, others = (
        torch.autograd.grad(s.sum() + n.square().sum(), leaves) for s, n in (actual, expected)
    )
    torch.testing.assert_close(grads, others)


def test_gradients_through_one_output_alone(impl):
    for index in (0, 1):
        leaves = [t.requires_grad_() for t in inputs()]
        output = add_layer_norm(*leaves, impl=impl)[index].square().sum()
        actual = torch.autograd.grad(output, leaves, allow_unused=True, materialize_grads=True)
        expected = torch.autograd.grad(
            plain(*leaves)[index].square().sum(), leaves, allow_unused=True, materialize_grads=True
        )
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_under_autocast_the_stream_keeps_its_dtype():
    x, y, *parameters = inputs()
    for stream in (x, x.bfloat16()):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            s, n = add_layer_norm(stream, y.bfloat16(), *parameters, impl="triton")
        assert (s.dtype, n.dtype) == (stream.dtype, torch.bfloat16)
        torch.testing.assert_close(n.float(), plain(x, y, *parameters)[1], rtol=0.05, atol=0.1)


def test_an_fp32_stream_takes_16_bit_branches():
    x, y, *parameters = inputs()
    tensors = [x, y.half(), *parameters]
    actual = results(add_layer_norm, tensors, impl="triton")
    expected = results(plain, [x, y.half().float(), *parameters])
    for name in NAMES:
        assert actual[name].dtype == tensors[NAMES.index(name)].dtype
        torch.testing.assert_close(
            actual[name].float(), expected[name], rtol=5e-3, atol=5e-3, msg=name
        )


@pytest.mark.parametrize("device", DEVICES)
def test_repeating_changes_no_bit(device):
    tensors = inputs(n=2000, device=device)
    first, again = (results(add_layer_norm, tensors, impl="triton") for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@norms
def test_compiles_without_a_graph_break(norm, plain, n, dtype, autocast, device):
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager" if device == "cpu" else "inductor")
    function = partial(norm, impl="triton")
    compiled = torch.compile(function, backend=counter, fullgraph=True)
    tensors = inputs(dtype=dtype, device=device, parameters=torch.float32)[:n]
    with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
        actual, expected = results(compiled, tensors), results(function, tensors)
    # a missing gradient is off by at least 1; Inductor rounds to bf16 less often
    error = 1e-4 if dtype == torch.float32 else 0.1
    for name, value in actual.items():
        torch.testing.assert_close(value, expected[name], rtol=error, atol=error, msg=name)
    assert counter.frame_count == 1


class Unchanged(TorchFunctionMode):
    """Record the names of functions that return one of their arguments unchanged."""

    def __init__(self):
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and any(result is x for x in args):
            self.names.append(func.__name__)
        return result


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@norms
def test_no_cast_returns_its_input(norm, plain, n, dtype, autocast):
    # if PyTorch 2.11 compiles such a cast, its output has no gradient
    tensors = [t.requires_grad_() for t in inputs(dtype=dtype, parameters=torch.float32)[:n]]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast), Unchanged() as unchanged:
        norm(*tensors, impl="triton")
    assert unchanged.names == []


@pytest.mark.parametrize("device", DEVICES)
def test_a_compiled_stream_without_a_branch_has_its_gradient(device):
    torch.compiler.reset()
    x, _, _, *parameters = inputs(device=device)

    def normalize(x, *parameters):
        return add_layer_norm(x, None, None, *parameters, impl="triton")

    backend = "aot_eager" if device == "cpu" else "inductor"
    compiled = torch.compile(normalize, backend=backend, fullgraph=True)
    names, tensors = ("x", "weight", "norm_bias"), [x, *parameters]
    actual, expected = (results(function, tensors, names) for function in (compiled, normalize))
    for name, value in actual.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("device", DEVICES)
def test_the_operator_is_well_registered(device):
    ds, dn, _, weight, _ = inputs(device=device)
    s = torch.randn_like(ds)
    mean, rstd = s.mean(-1, keepdim=True), s.var(-1, correction=0, keepdim=True).rsqrt()
    tensors = (ds, dn, s, mean, rstd, weight)
    torch.library.opcheck(torch.ops.papilio.layer_norm_bwd.default, tensors)
    torch.library.opcheck(
        torch.ops.papilio.layer_norm_bwd.default, (*tensors[:3], None, *tensors[4:])
    )


def test_errors_name_argument_and_value():
    x, y, bias, weight, norm_bias = inputs()
    cases = [
        ((x, y[1:], bias, weight, norm_bias), r"y must have .* x, \(37, 48\), got \(36, 48\)"),
        ((x, None, bias, weight, norm_bias), "bias is added to y, and y is None"),
        ((x, y, bias[1:], weight, norm_bias), r"bias must be \(48,\).*got \(47,\)"),
        ((x, y, bias, weight[1:], norm_bias), r"weight must be \(48,\).*got \(47,\)"),
        ((x, y, bias, weight, norm_bias[1:]), r"norm_bias must be \(48,\).*got \(47,\)"),
    ]
    for tensors, message in cases:
        with pytest.raises(ValueError, match=message):
            add_layer_norm(*tensors)
    with pytest.raises(ValueError, match=r"weight must be \(48,\).*got \(47,\)"):
        add_rms_norm(x, y, bias, weight[1:])
    with pytest.raises(ValueError, match="impl='triton' cannot serve this call: .* x is float64"):
        add_layer_norm(*(t.double() for t in inputs()), impl="triton")
