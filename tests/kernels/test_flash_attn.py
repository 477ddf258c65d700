"""flash-attn's signatures on the kernels, in the shapes of programs that call them."""

import pytest
import torch
from torch import Tensor

from kernels import flash_attention
from kernels.reference.standard import standard_attention
from kernels.testing import make_qkv
from papilio.flash_attn import flash_attn_func, flash_attn_varlen_func
from tests.kernels.tensors import random_tensors

# The CPU's default is unfused attention. These tests are of arguments, and fast with it; GPUs take
# the kernels.
each_device = pytest.mark.parametrize(
    ("device", "dtype"),
    [("cpu", torch.float32), pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu)],
)
WINDOWS = [(-1, -1), (None, None), (-1, 0), (6, 0), (6, -1), (6, 3), (0, 0)]


@each_device
@pytest.mark.parametrize("window", WINDOWS)
def test_causal_windows(device, dtype, window):
    qkv = make_qkv(2, 20, 25, 4, 2, 16, dtype=dtype, device=device)
    out = flash_attn_func(*qkv, causal=True, window_size=window)
    left = window[0]
    keys = None if left in (-1, None) else left + 1
    expected, _ = standard_attention(*qkv, causal=True, window_size=keys)
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)


@each_device
@pytest.mark.parametrize(
    ("window", "keys"),
    [((-1, -1), None), ((5, 5), 6), ((0, 0), 1), ((-1, 20), None), ((25, 30), None)],
)
def test_two_sided_windows(device, dtype, window, keys):
    qkv = make_qkv(2, 20, 20, 2, 2, 16, dtype=dtype, device=device)
    out = flash_attn_func(*qkv, window_size=window)
    expected, _ = standard_attention(*qkv, window_size=keys)
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)


def test_softcap_scale_and_dropout_are_passed_on():
    qkv = make_qkv(1, 30, 30, 2, 2, 16)
    torch.manual_seed(1)
    out = flash_attn_func(*qkv, 0.2, 0.3, True, softcap=2.0, deterministic=True)
    torch.manual_seed(1)
    expected = flash_attention(*qkv, dropout_p=0.2, softmax_scale=0.3, causal=True, softcap=2.0)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("lengths_q", "lengths_k"),
    [
        ([7, 1, 30], None),
        ([7, 0, 30], None),
        ([38], None),
        ([7, 3, 5], [7, 10, 40]),
        ([7, 3, 5], [2, 3, 0]),
    ],
)
@each_device
def test_varlen_is_attention_of_each_sequence(device, dtype, causal, lengths_q, lengths_k):
    cu_q, cu_k = offsets(lengths_q, device), offsets(lengths_k or lengths_q, device)
    cu_k = cu_q if lengths_k is None else cu_k
    n_q, n_k = int(cu_q[-1]), int(cu_k[-1])
    tensors = random_tensors(
        [(n_q, 4, 16), (n_k, 2, 16), (n_k, 2, 16), (n_q, 4, 16)], [dtype] * 4, device
    )
    *inputs, dout = tensors
    leaves = [x.clone().requires_grad_() for x in inputs]
    maxima = max(lengths_q), max(lengths_k or lengths_q)
    out = flash_attn_varlen_func(*leaves, cu_q, cu_k, *maxima, causal=causal)
    grads = torch.autograd.grad(out, leaves, dout)
    expected_leaves = [x.clone().requires_grad_() for x in inputs]
    parts = []
    for i in range(len(lengths_q)):
        rows, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        q, k, v = (x[None, r] for x, r in zip(expected_leaves, (rows, keys, keys), strict=True))
        if q.numel() and k.numel():
            parts.append(standard_attention(q, k, v, causal=causal)[0][0])
        else:
            parts.append(q[0] * 0)
    expected = torch.cat(parts)
    expected_grads = torch.autograd.grad(expected, expected_leaves, dout)
    actual, wanted = [out, *grads], [expected, *expected_grads]
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(actual, wanted, rtol=tolerance, atol=tolerance)


def test_slopes_act_on_distances_within_each_sequence():
    slopes = torch.tensor([0.5, 0.1])
    lengths = [5, 30]
    cu, inputs = offsets(lengths, "cpu"), random_tensors([(35, 2, 16)] * 3, [torch.float32] * 3)
    for causal in (True, False):
        out = flash_attn_varlen_func(*inputs, cu, cu, 30, 30, causal=causal, alibi_slopes=slopes)
        for part, *qkv in zip(*(x.split(lengths) for x in (out, *inputs)), strict=True):
            qkv = [x[None] for x in qkv]
            expected, _ = standard_attention(*qkv, causal=causal, alibi_slopes=slopes)
            torch.testing.assert_close(part[None], expected)


def offsets(lengths: list[int], device: str) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int().to(device)


def test_causal_self_attention_copies_nothing():
    cu = offsets([7, 30], "cpu")
    inputs = random_tensors([(37, 2, 16)] * 3, [torch.float32] * 3)
    starts = torch.tensor([0] * 7 + [7] * 30)[None]
    out = flash_attn_varlen_func(*inputs, cu, cu, 30, 30, causal=True)
    expected = flash_attention(*[x[None] for x in inputs], causal=True, doc_start=starts)[0]
    assert torch.equal(out, expected)


@each_device
def test_call_of_modded_nanogpt(device, dtype):
    # Its attention (train_gpt.py): one row of packed documents, 6 heads of 128, and a window.
    T = 96 if device == "cpu" else 4096
    tensors = random_tensors([(1, T, 6, 128)] * 4, [dtype] * 4, device)
    q, k, v = (x.requires_grad_() for x in tensors[:3])
    # cu_seqlens of a fixed length, filled up with the total
    seqlens = torch.tensor([0, 10, T // 2, T, T, T], dtype=torch.int32, device=device)
    window = 40 if device == "cpu" else 1024

    def attention(q, k, v):
        y = flash_attn_varlen_func(
            q[0], k[0], v[0], cu_seqlens_q=seqlens, cu_seqlens_k=seqlens, max_seqlen_q=T,
            max_seqlen_k=T, causal=True, softmax_scale=0.12, window_size=(window, 0),
        )  # fmt: skip
        return y.view(1, T, 6, 128)

    backend = "aot_eager" if device == "cpu" else "inductor"
    compiled = torch.compile(attention, dynamic=False, fullgraph=True, backend=backend)
    starts = torch.tensor([0] * 10 + [10] * (T // 2 - 10) + [T // 2] * (T - T // 2), device=device)
    options = {"causal": True, "softmax_scale": 0.12, "window_size": window + 1}
    expected, _ = standard_attention(q, k, v, doc_start=starts[None].int(), **options)
    wanted = [expected, *torch.autograd.grad(expected, (q, k, v), tensors[3])]
    for function in (attention, compiled):
        y = function(q, k, v)
        actual = [y, *torch.autograd.grad(y, (q, k, v), tensors[3])]
        torch.testing.assert_close(actual, wanted, rtol=2e-2, atol=2e-2)


@each_device
@pytest.mark.parametrize("window", [(-1, 0), (24, 0)])
def test_call_of_nanochat(device, dtype, window):
    # Its attention (gpt.py): heads of 128, grouped, with a long or a short window in each layer.
    B, T = (1, 64) if device == "cpu" else (4, 2048)
    tensors = random_tensors(
        [(B, T, 6, 128), (B, T, 2, 128), (B, T, 2, 128), (B, T, 6, 128)], [dtype] * 4, device
    )
    q, k, v = (x.requires_grad_() for x in tensors[:3])
    y = flash_attn_func(q, k, v, causal=True, window_size=window)
    keys = None if window[0] < 0 else window[0] + 1
    expected, _ = standard_attention(q, k, v, causal=True, window_size=keys)
    results = [[x, *torch.autograd.grad(x, (q, k, v), tensors[3])] for x in (y, expected)]
    torch.testing.assert_close(*results, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"window_size": (3, 2)}, r"window_size=\(3, 2\) must have equal sides"),
        ({"window_size": 3}, r"window_size must be \(left, right\)"),
        ({"alibi_slopes": torch.ones(1, 2)}, "slopes of each sequence are not supported"),
        ({"window_size": (-2, 0)}, r"window_size must be \(left, right\)"),
        (
            {"alibi_slopes": torch.ones(2), "softcap": 2.0},
            "softcap=2.0 cannot be combined with alibi_slopes",
        ),
        ({"return_attn_probs": True}, "return_attn_probs is not supported, .*return_lse=True"),
        ({"causal": 1}, "causal must be True or False"),
    ],
)
def test_unsupported_arguments_are_named(arguments, message):
    qkv = make_qkv(1, 5, 5, 2, 2, 16)
    with pytest.raises(ValueError, match=message):
        flash_attn_func(*qkv, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cu_seqlens_q": torch.tensor([0, 5])}, "cu_seqlens_q must be int32"),
        ({"cu_seqlens_k": torch.tensor([0, 2, 5]).int()}, "must describe the same sequences"),
        ({"max_seqlen_k": 0}, "max_seqlen_k must be the length of the longest"),
        ({"max_seqlen_q": 4}, "max_seqlen_q must be at least 5, the longest .* got 4"),
        ({"cu_seqlens_q": torch.tensor([2, 5]).int()}, r"must start at 0, .* got \[2, 5\]"),
        ({"cu_seqlens_k": torch.tensor([0, 6]).int()}, "cu_seqlens_k must .* end at 5"),
        ({"max_seqlen_q": torch.tensor(5)}, "max_seqlen_q must be an int, got a tensor"),
        ({"v": torch.zeros(4, 2, 16)}, "k and v must have one shape"),
        ({"q": torch.zeros(1, 5, 2, 16)}, r"q must be \(tokens, H, D\)"),
        ({"block_table": torch.zeros(1)}, "block_table is not supported"),
    ],
)
def test_malformed_varlen_arguments_are_named(arguments, message):
    x, cu = torch.zeros(5, 2, 16), torch.tensor([0, 5]).int()
    call = {"q": x, "k": x, "v": x, "cu_seqlens_q": cu, "cu_seqlens_k": cu}
    call |= {"max_seqlen_q": 5, "max_seqlen_k": 5}
    with pytest.raises(ValueError, match=message):
        flash_attn_varlen_func(**call | arguments)
