"""Two linear layers and a GELU: values, every gradient, and the tensors saved in between."""

from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from kernels.fused.gelu_mlp import gelu_mlp
from kernels.testing import assert_within_budget, poison_empty
from tests.kernels.tensors import each_dtype, random_tensors

on_gpu = pytest.mark.gpu
DEVICES = ["cpu", pytest.param("cuda", marks=on_gpu)]
NAMES = ("x", "w_in", "b_in", "w_out")


@pytest.fixture(params=["triton", "reference"])
def impl(request):
    return request.param


def inputs(n=300, width=24, inner=261, *, dtype=torch.float32, device="cpu", weights=None):
    """x and the weights, which may have another dtype."""
    shapes = (n, width), (inner, width), (inner,), (width, inner)
    scales = 1.0, width**-0.5 * 2, 1.0, inner**-0.5
    return random_tensors(shapes, [dtype, *[weights or dtype] * 3], device, scales)


def plain(x, w_in, b_in, w_out):
    return F.linear(F.gelu(F.linear(x, w_in, b_in), approximate="tanh"), w_out)


def without_bias(x, w_in, w_out, **options):
    return gelu_mlp(x, w_in, None, w_out, **options)


def results(function, tensors, names=NAMES, **options):
    """The output and all gradients, for a random gradient of the output."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    y = function(*leaves, **options)
    generator = torch.Generator().manual_seed(2)
    dy = torch.randn(y.shape, generator=generator).to(y)
    grads = torch.autograd.grad(y, leaves, dy)
    return {"y": y.detach()} | dict(zip(names, grads, strict=True))


def check_results(tensors, **options):
    """Compare values and gradients with PyTorch's, for tensors of one dtype."""
    with poison_empty():
        actual = results(gelu_mlp, tensors, **options)
    same_dtype, exact = results(plain, tensors), results(plain, [x.double() for x in tensors])
    for name, value in actual.items():
        assert value.dtype == tensors[0].dtype
        assert_within_budget(value, same_dtype[name], exact[name], factor=2.0, name=name)


@pytest.mark.parametrize("recompute", [False, True])
@each_dtype
def test_values_and_gradients(impl, dtype, device, recompute):
    check_results(inputs(dtype=dtype, device=device), impl=impl, recompute=recompute)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_no_bias_matches_a_bias_of_zero(impl, recompute, device):
    x, w_in, b_in, w_out = inputs(dtype=torch.float16, weights=torch.float32, device=device)
    expected = results(gelu_mlp, (x, w_in, b_in * 0, w_out), impl=impl, recompute=recompute)
    without = partial(without_bias, impl=impl, recompute=recompute)
    actual = results(without, (x, w_in, w_out), ("x", "w_in", "w_out"))
    for name, value in actual.items():
        torch.testing.assert_close(value, expected[name], msg=name)


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 257), (257, 5, 2), (0, 3, 4)])
def test_odd_shapes(impl, shape):
    tensors = inputs(*shape)
    actual, expected = results(gelu_mlp, tensors, impl=impl), results(plain, tensors)
    for name, value in actual.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-5, msg=name)


def test_large_inputs_do_not_overflow(impl):
    x = torch.tensor([[-1e4], [-40.0], [-8.0], [8.0], [1e4]])
    one, zero = torch.ones(1, 1), torch.zeros(1)
    actual = results(gelu_mlp, [x, one, zero, one], impl=impl)
    expected = results(plain, [t.double() for t in (x, one, zero, one)])
    for name, value in actual.items():
        torch.testing.assert_close(value.double(), expected[name], rtol=1e-4, atol=1e-12, msg=name)


def test_gradients_of_weights_are_never_rounded(impl):
    """Weights are fp32 and activations are not."""
    tensors = inputs(dtype=torch.float16, weights=torch.float32)
    actual = results(gelu_mlp, tensors, impl=impl)
    exact = results(plain, [x.double() for x in [tensors[0], *(w.half() for w in tensors[1:])]])
    for name in NAMES[1:]:
        assert actual[name].dtype == torch.float32
        assert not torch.equal(actual[name], actual[name].half().float())
        torch.testing.assert_close(actual[name].double(), exact[name], rtol=0.1, atol=0.05)


@pytest.mark.parametrize("device", DEVICES)
def test_weights_may_be_narrower_than_activations(impl, device):
    tensors = inputs(dtype=torch.float32, weights=torch.float16, device=device)
    actual = results(gelu_mlp, tensors, impl=impl)
    expected = results(plain, [x.float() for x in tensors])
    for name, value in actual.items():
        assert value.dtype == (torch.float16 if name in NAMES[1:] else torch.float32)
        torch.testing.assert_close(value.float(), expected[name], rtol=1e-3, atol=1e-3, msg=name)


def test_nan_is_not_hidden(impl):
    x, *weights = inputs(n=2)
    x[0, 0] = float("nan")
    found = results(gelu_mlp, [x, *weights], impl=impl)
    for name in ("y", "x"):
        assert found[name][0].isnan().all() and found[name][1].isfinite().all()
    assert found["w_in"].isnan().all() and found["w_out"].isnan().all()


def test_recomputing_changes_no_bit(impl):
    tensors = inputs(dtype=torch.float16)
    kept, again = (results(gelu_mlp, tensors, impl=impl, recompute=r) for r in (False, True))
    assert all(torch.equal(kept[name], again[name]) for name in kept)


@pytest.mark.parametrize(("recompute", "n_kept"), [(False, 2), (True, 1)])
def test_tensors_saved_for_the_backward_pass(impl, recompute, n_kept):
    tensors = [x.requires_grad_() for x in inputs()]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        gelu_mlp(*tensors, recompute=recompute, impl=impl)
    inner = [x for x in kept if x.shape == (300, 261)]
    assert len(inner) == n_kept


@pytest.mark.parametrize("weights", [torch.float16, torch.float32])
def test_operators_are_well_registered_for_any_weights(weights):
    tensors = [x.requires_grad_() for x in inputs(dtype=torch.float16, weights=weights)]
    torch.library.opcheck(torch.ops.papilio.gelu_mlp.default, (*tensors, True, "triton"))
    x, w_in, _, w_out = tensors
    torch.library.opcheck(
        torch.ops.papilio.gelu_mlp.default, (x, w_in, None, w_out, True, "triton")
    )


def test_leading_dimensions_are_kept(impl):
    x, *weights = inputs(n=12)
    y = gelu_mlp(x.view(3, 2, 2, 24), *weights, impl=impl)
    assert torch.equal(y, gelu_mlp(x, *weights, impl=impl).view(3, 2, 2, 24))


def test_autocast_chooses_the_dtype():
    x, *weights = inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = gelu_mlp(x, *weights)
    assert torch.equal(y, gelu_mlp(x.bfloat16(), *weights))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recompute", [False, True])
def test_compiles_without_a_graph_break(recompute, device):
    counter = CompileCounterWithBackend("aot_eager" if device == "cpu" else "inductor")
    compiled = torch.compile(gelu_mlp, backend=counter, fullgraph=True)
    tensors = inputs(device=device)
    options = {"impl": "triton", "recompute": recompute}
    actual, expected = results(compiled, tensors, **options), results(gelu_mlp, tensors, **options)
    for name, value in actual.items():
        torch.testing.assert_close(value, expected[name], msg=name)
    assert counter.frame_count == 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recompute", [False, True])
def test_operators_are_well_registered(recompute, device):
    tensors = [x.requires_grad_() for x in inputs(device=device)]
    torch.library.opcheck(torch.ops.papilio.gelu_mlp.default, (*tensors, recompute, "triton"))
    x, *weights = (t.detach() for t in tensors)
    y, h, g, *_ = torch.ops.papilio.gelu_mlp(x, *weights, recompute, "triton")
    backward = (torch.randn_like(y), x, h, g, *weights, "triton")
    torch.library.opcheck(torch.ops.papilio.gelu_mlp_bwd.default, backward)


def test_flops_match_the_gemms():
    tensors = [x.requires_grad_() for x in inputs()]
    with FlopCounterMode(display=False) as counter:
        gelu_mlp(*tensors).sum().backward()
    assert counter.get_total_flops() == 6 * 2 * 300 * 24 * 261


def test_a_second_derivative_is_refused():
    tensors = [x.requires_grad_() for x in inputs()]
    (dx,) = torch.autograd.grad(gelu_mlp(*tensors).sum(), tensors[0], create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        dx.sum().backward()


def test_errors_name_argument_and_value():
    x, w_in, b_in, w_out = inputs()
    cases = [
        ((x[0], w_in, b_in, w_out), r"x must be \(..., C\), w_in \(F, C\).*got \(24,\)"),
        ((x, w_in, b_in, w_in), r"\(300, 24\), \(261, 24\) and \(261, 24\)"),
        ((x, w_in, b_in[1:], w_out), r"b_in must be \(261,\), the rows of w_in, got \(260,\)"),
        ((x, w_in, b_in.half(), w_out), "of one dtype, got .*torch.float16"),
        ((x, w_in, b_in.to("meta"), w_out), "b_in on meta"),
    ]
    for tensors, message in cases:
        with pytest.raises(ValueError, match=message):
            gelu_mlp(*tensors)
    with pytest.raises(ValueError, match="impl must be None or one of"):
        gelu_mlp(x, w_in, b_in, w_out, impl="cuda")
    with pytest.raises(ValueError, match="impl='triton' cannot serve this call: .* x is float64"):
        gelu_mlp(*(t.double() for t in (x, w_in, b_in, w_out)), impl="triton")
