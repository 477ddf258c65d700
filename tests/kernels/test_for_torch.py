"""PyTorch's attention on the registered kernels: the math backend's results, in all layouts.

On the CPU the interpreted kernels serve the calls, on a GPU the compiled ones.
"""

import random
from collections import Counter

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

import papilio
from kernels import for_torch
from kernels.for_torch import register_with_torch, unregister_with_torch
from kernels.reference.standard import standard_attention
from kernels.testing import assert_within_budget
from tests.kernels.tensors import random_tensors

DTYPES = {"cpu": (torch.float32, torch.float16), "cuda": (torch.float16, torch.bfloat16)}
each_device = pytest.mark.parametrize(
    ("device", "dtype"),
    [("cpu", dtype) for dtype in DTYPES["cpu"]]
    + [pytest.param("cuda", dtype, marks=pytest.mark.gpu) for dtype in DTYPES["cuda"]],
)


@pytest.fixture(autouse=True)
def launches(monkeypatch):
    """Register the kernels, and count their launches by name."""
    counts = Counter()
    for name in ("launch_fwd", "launch_bwd"):
        launch = getattr(for_torch, name)

        def counted(*arguments, name=name, launch=launch):
            counts[name] += 1
            return launch(*arguments)

        monkeypatch.setattr(for_torch, name, counted)
    register_with_torch()
    yield counts
    unregister_with_torch()


def results(attention, tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients of attention(q, k, v); tensors also holds the gradient of the output."""
    # Copies keep strides.
    *inputs, dout = [x.detach().clone().to(dtype) for x in tensors]
    inputs = [x.requires_grad_() for x in inputs]
    out = attention(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, dout)]


def assert_as_math(actual, exact_attention, tensors: list[Tensor], dtype: torch.dtype) -> None:
    """Assert that out and gradients stay within the error budget against the math backend."""
    with sdpa_kernel(SDPBackend.MATH):
        exact = results(exact_attention, tensors, torch.float64)
        same = results(exact_attention, tensors, dtype)
    # dq and dk are sums of p * (dp - delta), and few keys make dp and delta equal: dp = dout v^T.
    q, k, v, dout = (x.double().norm(dim=-1).amax().item() for x in tensors)
    scale = tensors[0].shape[-1] ** -0.5
    cancelled = {"dq": scale * k * v * dout, "dk": scale * q * v * dout}
    # dv is recomputed from scores and lse, which cancel in the exponent.
    cancelled["dv"] = scale * q * k * dout
    for name, *values in zip(("out", "dq", "dk", "dv"), actual, same, exact, strict=True):
        assert_within_budget(
            *values, factor=2 if name == "out" else 3, name=name,
            cancelled=cancelled.get(name, 0.0),
        )  # fmt: skip


def in_layout(x: Tensor, layout: str) -> Tensor:
    """Rearrange x (B, H, T, D) in memory."""
    if layout == "heads first":
        return x
    if layout == "tokens first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "tokens before batch":  # as in nn.MultiheadAttention
        return x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    return x.repeat(1, 1, 1, 3)[..., : x.shape[-1]]  # a slice of a wider tensor


LAYOUTS = ["heads first", "tokens first", "tokens before batch", "slice"]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("seed", range(40))
def test_sdpa_matches_the_math_backend(device, seed, launches):
    draw, dtype = random.Random(seed), DTYPES[device][seed % 2]
    B, n_kv, group = draw.randint(1, 3), draw.randint(1, 2), draw.choice([1, 1, 3])
    causal = draw.random() < 0.5
    T_q = draw.randint(1, 60)
    T_k = T_q if causal else draw.randint(1, 60)
    D = draw.choice([8, 16, 24, 64])
    shapes = [(B, n, T, D) for n, T in ((n_kv * group, T_q), (n_kv, T_k), (n_kv, T_k))]
    tensors = random_tensors([*shapes, shapes[0]], [dtype] * 4, device)
    tensors = [in_layout(x, draw.choice(LAYOUTS)) for x in tensors]
    scale = draw.choice([None, 0.3])

    def attention(q, k, v):
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=scale, enable_gqa=group > 1
        )

    actual = results(attention, tensors, dtype)
    assert launches == {"launch_fwd": 1, "launch_bwd": 1}
    assert_as_math(actual, attention, tensors, dtype)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("seed", range(40))
def test_varlen_attn_matches_the_math_backend(device, seed, launches):
    draw, dtype = random.Random(seed), DTYPES[device][seed % 2]
    heads, D = draw.randint(1, 2), draw.choice([8, 16, 64])
    window = draw.choice([(-1, -1), (-1, 0), (-1, 0), (7, 0), (5, 5)])
    lengths_q = [draw.choice([1, 2, 9, 33, 40]) for _ in range(draw.randint(1, 4))]
    lengths_k = lengths_q if draw.random() < 0.6 else [n + draw.randint(0, 20) for n in lengths_q]
    cu_q = torch.tensor([0, *lengths_q]).cumsum(0).int().to(device)
    cu_k = cu_q if lengths_k is lengths_q else torch.tensor([0, *lengths_k]).cumsum(0).int()
    cu_k = cu_k.to(device)
    shapes = [(sum(lengths), heads, D) for lengths in (lengths_q, lengths_k, lengths_k, lengths_q)]
    tensors = random_tensors(shapes, [dtype] * 4, device)

    def attention(q, k, v):
        maxima = max(lengths_q), max(lengths_k)
        return varlen_attn(q, k, v, cu_q, cu_k, *maxima, window_size=window)

    def masked(q, k, v):
        mask = visible(lengths_q, lengths_k, window).to(device)
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(0, 1)

    actual = results(attention, tensors, dtype)
    assert launches == {"launch_fwd": 1, "launch_bwd": 1}
    assert_as_math(actual, masked, tensors, dtype)


def visible(lengths_q: list[int], lengths_k: list[int], window: tuple[int, int]) -> Tensor:
    """(queries, keys) bool: pairs of one sequence within a window, aligned at the bottom right."""
    blocks = []
    for n_q, n_k in zip(lengths_q, lengths_k, strict=True):
        distance = torch.arange(n_q)[:, None] + n_k - n_q - torch.arange(n_k)
        left, right = (n_k if side < 0 else side for side in window)
        blocks.append((distance <= left) & (distance >= -right))
    return torch.block_diag(*blocks).bool()


@each_device
def test_dropout_repeats_in_the_backward_pass(device, dtype):
    shape = 2, 2, 40, 16
    q, k, v, dout = random_tensors([shape] * 4, [dtype] * 4, device)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out, *_, state, _, _ = torch.ops.aten._scaled_dot_product_flash_attention(*inputs, 0.3, True)
    grads = torch.autograd.grad(out, inputs, dout)
    seed = state[:1].view(torch.int64)

    def standard(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, _ = standard_attention(q, k, v, causal=True, dropout_p=0.3, dropout_seed=seed)
        return out.transpose(1, 2)

    assert_as_math([out.detach(), *grads], standard, [q, k, v, dout], dtype)


@each_device
def test_results_have_the_strides_of_the_fakes(device, dtype):
    # Inductor trusts the fakes.
    for layout in LAYOUTS:
        tensors = [in_layout(x, layout) for x in random_tensors([(2, 3, 20, 16)] * 3, [dtype] * 3)]
        q, k, v = (x.to(device).requires_grad_() for x in tensors)
        out = F.scaled_dot_product_attention(q, k, v)
        assert out.stride() == torch.empty_like(q).stride()
        if device == "cuda":
            grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
                out, q, k, v, out, *forward_rest(q, k, v), 0.0, False, *[out.new_empty(2)] * 2
            )
            assert [x.stride() for x in grads] == [torch.empty_like(x).stride() for x in (q, k, v)]


def forward_rest(q, k, v) -> tuple:
    """Results of a forward pass that its backward pass reads: lse to max_k."""
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)[1:6]


@pytest.mark.parametrize(
    ("device", "backend"),
    [("cpu", "aot_eager"), pytest.param("cuda", "inductor", marks=pytest.mark.gpu)],
)
def test_compiled_models_use_the_kernels(device, backend, launches):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    tensors = random_tensors([(2, 2, 33, 16)] * 4, [dtype] * 4, device)
    cu = torch.tensor([0, 10, 33], dtype=torch.int32, device=device)

    def attention(q, k, v):
        out = F.scaled_dot_product_attention(q * 1.5, k, v, is_causal=True)
        rows = [x.transpose(1, 2)[0] for x in (out, k, v)]
        return out + varlen_attn(*rows, cu, cu, 23, 23, window_size=(-1, 0)).transpose(0, 1)

    expected = results(attention, tensors, dtype)
    launches.clear()
    torch._dynamo.reset()
    actual = results(torch.compile(attention, backend=backend, fullgraph=True), tensors, dtype)
    assert launches == {"launch_fwd": 2, "launch_bwd": 2}
    torch.testing.assert_close(actual, expected)


def test_a_mask_of_scores_stays_with_pytorch(launches, caplog):
    for_torch._LOGGED.clear()
    q, k, v, bias = random_tensors([(1, 2, 9, 16)] * 3 + [(9, 9)], [torch.float32] * 4)
    with sdpa_kernel(SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    for _ in range(2):
        torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v, bias), expected)
    assert not launches
    (record,) = caplog.records
    assert "attn_mask is not supported" in record.getMessage()


def test_a_reason_is_logged_once_whatever_the_sizes_in_it(launches, caplog):
    for_torch._LOGGED.clear()
    for head_dim in (264, 272):
        (x,) = random_tensors([(1, 2, 9, head_dim)], [torch.float32])
        F.scaled_dot_product_attention(x, x, x)
    assert not launches
    (record,) = caplog.records
    assert "head_dim must be at most 256, got 264" in record.getMessage()


def test_the_interpreter_leaves_bfloat16_to_pytorch(launches):
    (x,) = random_tensors([(1, 2, 9, 16)], [torch.bfloat16])
    F.scaled_dot_product_attention(x, x, x)
    assert not launches


def test_unequal_sides_of_a_window_are_refused_by_name():
    (x,) = random_tensors([(9, 2, 16)], [torch.float32])
    cu = torch.tensor([0, 9], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match=r"window_size=\(3, 2\) must have equal sides"):
        varlen_attn(x, x, x, cu, cu, 9, 9, window_size=(3, 2))


@pytest.mark.gpu
def test_unequal_sides_of_a_window_run_on_pytorch(launches):
    tensors = random_tensors([(40, 2, 16)] * 4, [torch.bfloat16] * 4, "cuda")
    cu = torch.tensor([0, 40], dtype=torch.int32, device="cuda")

    def attention(q, k, v):
        return varlen_attn(q, k, v, cu, cu, 40, 40, window_size=(3, 2))

    actual = results(attention, tensors, torch.bfloat16)
    assert not launches
    unregister_with_torch()
    torch.testing.assert_close(actual, results(attention, tensors, torch.bfloat16))


def test_unregistering_restores_pytorch(launches):
    order = torch._C._get_sdp_priority_order()
    register_with_torch()  # a second time changes nothing
    assert torch._C._get_sdp_priority_order() == order
    papilio.unregister_with_torch()
    assert torch.nn.attention.current_flash_attention_impl() is None
    (x,) = random_tensors([(1, 1, 5, 16)], [torch.float32])
    F.scaled_dot_product_attention(x, x, x)
    assert not launches
    unregister_with_torch()  # nothing to undo


def test_a_registration_of_another_package_replaces_this_one():
    torch.nn.attention.register_flash_attention_impl("other", register_fn=lambda: None)
    torch.nn.attention.activate_flash_attention_impl("other")
    assert torch.nn.attention.current_flash_attention_impl() is None
    unregister_with_torch()


def test_unknown_kernels_are_refused():
    with pytest.raises(ValueError, match=r"impl must be None or one of .*, got 'sdpa'"):
        register_with_torch(impl="sdpa")


def test_a_pytorch_without_the_registry_is_named(monkeypatch):
    monkeypatch.delattr(torch.nn.attention, "register_flash_attention_impl")
    with pytest.raises(ImportError, match="PyTorch .* has no registry of flash kernels"):
        register_with_torch()


@pytest.mark.gpu
def test_calls_that_padding_would_blow_up_stay_with_pytorch(launches):
    lengths = torch.tensor([0, *[1] * 999, 5000]).cumsum(0).int().cuda()
    (x,) = random_tensors([(5999, 1, 16)], [torch.bfloat16], "cuda")
    varlen_attn(x, x, x, lengths, lengths, 5000, 5000)
    assert not launches
    varlen_attn(x, x, x, lengths, lengths, 5000, 5000, window_size=(-1, 0))
    assert launches == {"launch_fwd": 1}


@pytest.mark.gpu
def test_cuda_graphs_of_compiled_models(launches):
    cu = torch.tensor([0, 10, 33], dtype=torch.int32, device="cuda")
    tensors = random_tensors([(33, 2, 16)] * 4, [torch.bfloat16] * 4, "cuda")

    def attention(q, k, v):
        causal = varlen_attn(q, k, v, cu, cu, 23, 23, window_size=(-1, 0))
        return causal + varlen_attn(q, k, v, cu, cu, 23, 23)

    expected = results(attention, tensors, torch.bfloat16)
    torch._dynamo.reset()
    compiled = torch.compile(attention, mode="reduce-overhead")
    for _ in range(4):
        actual = [x.clone() for x in results(compiled, tensors, torch.bfloat16)]
        torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(results(attention, tensors, torch.bfloat16), expected)


@pytest.mark.gpu
def test_flash_attention_is_preferred_to_cudnn(launches):
    (x,) = random_tensors([(1, 2, 64, 64)], [torch.bfloat16], "cuda")
    F.scaled_dot_product_attention(x, x, x)
    assert launches["launch_fwd"] == 1
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        F.scaled_dot_product_attention(x, x, x)
    assert launches["launch_fwd"] == 1  # a choice of the caller's own stays


@pytest.mark.gpu(2)
def test_another_gpu_than_the_current_one(launches):
    tensors = random_tensors([(2, 2, 70, 64)] * 4, [torch.bfloat16] * 4, "cuda:1")

    def attention(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    assert torch.cuda.current_device() == 0
    actual = results(attention, tensors, torch.bfloat16)
    assert launches == {"launch_fwd": 1, "launch_bwd": 1}
    assert_as_math(actual, attention, tensors, torch.bfloat16)
