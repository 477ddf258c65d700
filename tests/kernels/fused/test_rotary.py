"""Split, normalisation and rotation of queries and keys: values, gradients, and compilation."""

from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from kernels.fused.rotary import rotary_qkv
from kernels.testing import assert_within_budget, poison_empty
from tests.kernels.tensors import each_dtype, random_tensors

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NAMES = ("qkv", "q_weight", "k_weight")
# (B, T, H, H_kv, D): one of each, an odd half, grouped heads, and more rows than a program takes.
SHAPES = [(1, 1, 1, 1, 2), (2, 5, 3, 1, 6), (1, 7, 4, 2, 16), (3, 33, 2, 2, 12), (1, 9, 2, 1, 300)]


@pytest.fixture(params=["triton", "reference"])
def impl(request):
    return request.param


def inputs(shape=(3, 33, 4, 2, 16), *, dtype=torch.float32, device="cpu", by_row=False):
    """qkv and weights, and n_kv_head, cos and sin."""
    B, T, H, H_kv, D = shape
    tensors = random_tensors(
        [(B, T, H + 2 * H_kv, D), (D,), (D,)], [dtype, torch.float32, torch.float32], device
    )
    (angles,) = random_tensors([(B, T, D // 2) if by_row else (T, D // 2)], [torch.float32], device)
    return tensors, (H_kv, angles.cos(), angles.sin())


def plain(qkv, q_weight, k_weight, n_kv_head, cos, sin, eps=1e-6):
    """The same as a product with complex numbers, whose gradient is PyTorch's."""
    n_head = qkv.shape[2] - 2 * n_kv_head
    q, k, v = qkv.split((n_head, n_kv_head, n_kv_head), dim=2)
    turn = torch.complex(cos.to(qkv.dtype), sin.to(qkv.dtype))[..., None, :]

    def rotate(x, weight):
        if weight is not None:
            x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight
        y = torch.complex(*x.chunk(2, dim=-1)) * turn
        return torch.cat((y.real, y.imag), dim=-1)

    return rotate(q, q_weight), rotate(k, k_weight), v


def ours(qkv, q_weight, k_weight, *rest, **options):
    return rotary_qkv(qkv, *rest, q_weight=q_weight, k_weight=k_weight, **options)


def results(function, tensors, rest, **options):
    """Queries, keys, values, and all gradients for random gradients of these."""
    leaves = [None if x is None else x.detach().requires_grad_() for x in tensors]
    outputs = function(*leaves, *rest, **options)
    generator = torch.Generator().manual_seed(2)
    signs = [torch.randint(2, x.shape, generator=generator) for x in outputs]
    grads = [(2 * sign - 1).to(x) for sign, x in zip(signs, outputs, strict=True)]
    given = {name: x for name, x in zip(NAMES, leaves, strict=True) if x is not None}
    found = torch.autograd.grad(outputs, list(given.values()), grads)
    values = dict(zip("qkv", (x.detach() for x in outputs), strict=True))
    return values | {f"d{name}": grad for name, grad in zip(given, found, strict=True)}


def exact(tensors, rest):
    return results(plain, [None if x is None else x.double() for x in tensors], rest)


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_odd_shapes(shape, normalised, by_row, impl):
    (qkv, *weights), rest = inputs(shape, by_row=by_row)
    tensors = [qkv, *(weights if normalised else (None, None))]
    with poison_empty():
        actual = results(ours, tensors, rest, impl=impl)
    for name, value in exact(tensors, rest).items():
        torch.testing.assert_close(actual[name].double(), value, rtol=1e-4, atol=1e-4, msg=name)


@each_dtype
@pytest.mark.parametrize("normalised", [False, True])
def test_values_and_gradients(normalised, impl, dtype, device):
    (qkv, *weights), rest = inputs(dtype=dtype, device=device)
    tensors = [qkv, *(weights if normalised else (None, None))]
    actual = results(ours, tensors, rest, impl=impl)
    wide = exact(tensors, rest)
    single = results(plain, [None if x is None else x.float() for x in tensors], rest)
    for name, value in actual.items():
        assert value.dtype == (torch.float32 if "weight" in name else dtype)
        rounded = single[name].to(value.dtype)  # nothing is rounded before the end
        assert_within_budget(value, rounded, wide[name], factor=2.0, name=name)


def test_rows_beyond_the_last_change_no_sum(impl):
    """With eps=0, a row of zeros has an infinite norm."""
    tensors, rest = inputs((1, 65, 2, 1, 16))
    actual, expected = results(ours, tensors, rest, impl=impl, eps=0.0), exact(tensors, rest)
    for name, value in expected.items():
        torch.testing.assert_close(actual[name].double(), value, rtol=1e-4, atol=1e-4, msg=name)


def test_tables_of_any_dtype_are_computed_in_fp32(impl):
    (qkv, *_), (n_kv_head, cos, sin) = inputs(dtype=torch.float16)
    cos, sin = cos.half(), sin.half()
    q, k, _ = rotary_qkv(qkv, n_kv_head, cos, sin, impl=impl)
    wide = rotary_qkv(qkv, n_kv_head, cos.float(), sin.float(), impl=impl)
    assert torch.equal(q, wide[0]) and torch.equal(k, wide[1])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "head_dim"), [((12, 4), 64), ((6, 2), 128), ((16, 16), 80), ((2, 1), 256)]
)
def test_model_shapes(heads, head_dim):
    tensors, rest = inputs((4, 1000, *heads, head_dim), dtype=torch.bfloat16, device="cuda")
    actual, wide = results(ours, tensors, rest, impl="triton"), exact(tensors, rest)
    for name, value in actual.items():
        error = (value - wide[name]).norm() / wide[name].norm()
        assert error < 5e-3, name


@pytest.mark.parametrize("device", DEVICES)
def test_values_are_a_view_and_repeating_changes_no_bit(device):
    tensors, rest = inputs((2, 700, 4, 2, 16), device=device)
    first, again = (results(ours, tensors, rest, impl="triton") for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    v = ours(*tensors, *rest, impl="triton")[2]
    assert v.untyped_storage().data_ptr() == tensors[0].untyped_storage().data_ptr()


def test_gradients_through_one_output_alone(impl):
    for index in range(3):
        tensors, rest = inputs()
        leaves = [x.requires_grad_() for x in tensors]
        grads = []
        for function in (partial(ours, impl=impl), plain):
            output = function(*leaves, *rest)[index].square().sum()
            grads.append(
                torch.autograd.grad(output, leaves, allow_unused=True, materialize_grads=True)
            )
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


def test_strides_and_no_tokens(impl):
    (qkv, *weights), rest = inputs()
    strided = qkv.transpose(1, 2).contiguous().transpose(1, 2)
    expected = results(ours, [qkv, *weights], rest, impl=impl)
    for name, value in results(ours, [strided, *weights], rest, impl=impl).items():
        torch.testing.assert_close(value, expected[name], msg=name)
    n_kv_head, cos, sin = rest
    q, k, v = ours(qkv[:, :0], *weights, n_kv_head, cos[:0], sin[:0], impl=impl)
    assert q.shape == (3, 0, 4, 16) and k.shape == v.shape == (3, 0, 2, 16)
    none = results(ours, [qkv[:, :0], *weights], (n_kv_head, cos[:0], sin[:0]), impl=impl)
    assert none["dq_weight"].abs().max() == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("normalised", [False, True])
def test_compiles_without_a_graph_break(normalised, device):
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager" if device == "cpu" else "inductor")
    (qkv, *weights), rest = inputs(dtype=torch.bfloat16, device=device)
    tensors = [qkv, *(weights if normalised else (None, None))]
    function = partial(ours, impl="triton")

    def squared(*arguments):  # a consumer of all three, as attention is
        q, k, v = function(*arguments)
        return q * 2, k + v, v * v

    compiled = torch.compile(squared, backend=counter, fullgraph=True)
    actual, expected = results(compiled, tensors, rest), results(squared, tensors, rest)
    for name, value in actual.items():
        torch.testing.assert_close(value, expected[name], rtol=0.02, atol=0.02, msg=name)
    assert counter.frame_count == 1


@pytest.mark.parametrize("device", DEVICES)
def test_the_operators_are_well_registered(device):
    (qkv, *weights), (n_kv_head, cos, sin) = inputs(device=device)
    forward, backward = (
        torch.ops.papilio.rotary_qkv.default,
        torch.ops.papilio.rotary_qkv_bwd.default,
    )
    q, k, v = ours(qkv, *weights, n_kv_head, cos, sin, impl="triton")
    for some, saved in ((weights, qkv), ((None, None), None)):
        torch.library.opcheck(forward, (qkv, cos, sin, *some, n_kv_head, 1e-6))
        torch.library.opcheck(backward, (q, k, v, saved, cos, sin, *some, 1e-6))


def test_errors_name_argument_and_value():
    (qkv, q_weight, k_weight), (_, cos, sin) = inputs()
    weights = {"q_weight": q_weight, "k_weight": k_weight}
    cases = [
        ((qkv[0], 2, cos, sin), {}, r"qkv must be \(B, T, H \+ 2 H_kv, D\).*got \(33, 8, 16\)"),
        ((qkv[:, :, :2], 1, cos, sin), {}, r"at least 3 heads.*got \(3, 33, 2, 16\)"),
        ((qkv[..., :15], 2, cos, sin), {}, r"even D, got \(3, 33, 8, 15\)"),
        ((qkv[..., :0], 2, cos, sin), {}, r"even D, got \(3, 33, 8, 0\)"),
        ((qkv, 4, cos, sin), {}, "n_kv_head must be from 1 to 3, as qkv has 8 heads, got 4"),
        ((qkv, 2, cos[1:], sin), {}, r"cos must be \(33, 8\) or \(3, 33, 8\).*got \(32, 8\)"),
        ((qkv, 2, cos, sin.int()), {}, r"sin must be .* got \(33, 8\) in torch.int32"),
        ((qkv, 2, cos, sin.expand(3, 33, 8)), {}, "must have one shape"),
        ((qkv, 2, cos, sin), {"q_weight": q_weight}, "both q_weight and k_weight, or neither"),
        ((qkv, 2, cos, sin), weights | {"k_weight": k_weight[1:]}, r"k_weight must be \(16,\)"),
        ((qkv, 2, cos, sin), weights | {"eps": -1.0}, "eps must be .* got -1.0"),
    ]
    for arguments, options, message in cases:
        with pytest.raises(ValueError, match=message):
            rotary_qkv(*arguments, **options)


def test_there_is_no_second_derivative():
    (qkv, *weights), rest = inputs()
    qkv.requires_grad_()
    q, _, _ = ours(qkv, *weights, *rest, impl="triton")
    (grad,) = torch.autograd.grad(q.square().sum(), qkv, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative: pass impl='reference'"):
        grad.sum().backward()
