"""The Triton kernels against standard attention: the output, lse and every gradient.

Interpreted on the CPU in fp32 and fp16 (bf16 products are not right there), compiled on a GPU.
"""

import re
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kernels import flash_attention
from kernels.attention import MAX_HEAD_DIM
from kernels.reference import standard_attention
from kernels.testing import check_attention, make_qkv, poison_empty

triton_attention = partial(flash_attention, impl="triton", return_lse=True)

on_gpu = pytest.mark.gpu
DEVICES = ["cpu", pytest.param("cuda", marks=on_gpu)]
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=on_gpu)]


def device_for(dtype):
    return "cuda" if torch.cuda.is_available() or dtype == torch.bfloat16 else "cpu"


def check(batch, seq_q, seq_k, n_head, n_kv_head, head_dim, dtype, device=None, **options):
    device = device or device_for(dtype)
    q, k, v = make_qkv(
        batch, seq_q, seq_k, n_head, n_kv_head, head_dim,
        dtype=dtype, device=device, requires_grad=True, scale=options.pop("scale", 1.0),
    )  # fmt: skip
    with poison_empty():
        return check_attention(triton_attention, q, k, v, with_dlse=True, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("seq", [1, 7, 63, 65, 130])
def test_any_length(seq, causal, dtype):
    check(2, seq, seq, 2, 2, 32, dtype, causal=causal)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("head_dim", [16, 40, 64, 80, 96, 128, 3])
def test_any_head_dim(head_dim, causal, dtype):
    check(1, 67, 67, 1, 1, head_dim, dtype, causal=causal)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("seq_q", "seq_k"), [(1, 70), (33, 130), (130, 33), (65, 64), (64, 65)])
def test_causal_aligns_at_the_bottom_right(seq_q, seq_k, dtype):
    check(1, seq_q, seq_k, 2, 2, 16, dtype, causal=True)


@pytest.mark.parametrize("n_kv_head", [1, 2])
def test_grouped_queries(n_kv_head):
    check(2, 40, 50, 4, n_kv_head, 16, torch.float32, causal=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_dropout_is_the_references(causal, dtype):
    check(2, 70, 70, 2, 1, 32, dtype, causal=causal, dropout_p=0.3, dropout_seed=2**40 + 11)


@pytest.mark.parametrize("scale", [20.0, 1e-3])
def test_extreme_logits(scale):
    check(1, 65, 65, 1, 1, 64, torch.float32, causal=True, scale=scale)


def test_softmax_scale():
    check(1, 33, 33, 1, 1, 32, torch.float32, causal=True, softmax_scale=0.5)


def test_row_without_keys_is_zero():
    q, k, v = make_qkv(1, 70, 40, 1, 1, 16, dtype=torch.float32, requires_grad=True,
                       device=device_for(torch.float32))  # fmt: skip
    out, lse = triton_attention(q, k, v, causal=True)
    out.sum().backward()
    assert torch.all(out[:, :30] == 0) and torch.all(torch.isneginf(lse[..., :30]))
    assert torch.all(q.grad[:, :30] == 0)
    assert all(torch.isfinite(t.grad).all() for t in (q, k, v))


def strided_variants():
    """q, k, v and dout as a model and autograd hand them over, none of them contiguous."""
    device = device_for(torch.float32)
    B, T, H, D = 2, 50, 3, 16
    views = torch.randn(B, T, 3, H, D, device=device).unbind(2)
    heads_first = [torch.randn(B, H, T, D, device=device).transpose(1, 2) for _ in range(3)]
    padded = [torch.randn(B, T, H, D + 5, device=device)[..., :D] for _ in range(3)]
    return {"views of one projection": views, "heads first": heads_first, "padded": padded}


@pytest.mark.parametrize("name", ["views of one projection", "heads first", "padded"])
def test_strides(name):
    q, k, v = (t.detach().requires_grad_() for t in strided_variants()[name])
    dout = torch.randn(2, 3, 16, 50, device=q.device).permute(0, 3, 1, 2)
    out = flash_attention(q, k, v, causal=True, impl="triton")
    expected = standard_attention(q, k, v, causal=True)[0]
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    for got, want in zip(
        torch.autograd.grad(out, (q, k, v), dout),
        torch.autograd.grad(expected, (q, k, v), dout),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_broadcast_gradient():
    # the gradient of sum() is one number expanded: all strides 0
    q, k, v = make_qkv(1, 20, 20, 1, 1, 16, dtype=torch.float32, requires_grad=True,
                       device=device_for(torch.float32))  # fmt: skip
    got = torch.autograd.grad(flash_attention(q, k, v, impl="triton").sum(), v)[0]
    want = torch.autograd.grad(standard_attention(q, k, v)[0].sum(), v)[0]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("impl", ["triton", "sdpa", "reference"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_implementations_agree(impl, causal):
    q, k, v = make_qkv(2, 45, 45, 2, 1, 16, dtype=torch.float32,
                       device=device_for(torch.float32))  # fmt: skip
    expected = standard_attention(q, k, v, causal=causal, softmax_scale=0.3)[0]
    out = flash_attention(q, k, v, causal=causal, softmax_scale=0.3, impl=impl)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("needs_grad", [True, False])
def test_operator_is_well_registered(needs_grad):
    device = device_for(torch.float32)
    q, k, v = make_qkv(1, 20, 20, 2, 2, 16, dtype=torch.float32, device=device,
                       requires_grad=needs_grad)  # fmt: skip
    seed = torch.tensor([3], device=device)
    options = (0.25, True, 0.1, "triton")
    torch.library.opcheck(torch.ops.papilio.attn_fwd.default, (q, k, v, seed, *options))
    out, lse = torch.ops.papilio.attn_fwd(q, k, v, seed, *options)
    torch.library.opcheck(
        torch.ops.papilio.attn_bwd.default,
        (torch.randn_like(out), None, *(t.detach() for t in (q, k, v, out, lse)), seed, *options),
    )


@pytest.mark.parametrize(
    ("device", "backend"), [("cpu", "aot_eager"), pytest.param("cuda", "inductor", marks=on_gpu)]
)
def test_compiles_without_a_graph_break(device, backend):
    def f(x, seed):
        q, k, v = x.unbind(2)
        out, lse = flash_attention(
            q, k, v, causal=True, dropout_p=0.2, dropout_seed=seed, impl="triton", return_lse=True
        )
        return (out.square().sum(-1) + lse.transpose(1, 2)).sum()

    x = torch.randn(1, 33, 3, 2, 16, device=device, requires_grad=True)
    seed = torch.tensor([5], device=device)
    compiled = torch.compile(f, fullgraph=True, backend=backend)
    expected = f(x, seed)
    got = compiled(x, seed)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(
        torch.autograd.grad(got, x)[0], torch.autograd.grad(expected, x)[0], rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(("causal", "pairs"), [(False, 3 * 5), (True, 3 + 4 + 5)])
def test_flop_count(causal, pairs):
    q, k, v = make_qkv(2, 3, 5, 4, 4, 16, dtype=torch.float32, requires_grad=True,
                       device=device_for(torch.float32))  # fmt: skip
    forward = 4 * 2 * 4 * 16 * pairs
    with FlopCounterMode(display=False) as counter:
        flash_attention(q, k, v, causal=causal, impl="triton").sum().backward()
    assert counter.get_total_flops() == forward + 5 * forward // 2


def test_works_without_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from kernels import flash_attention; x = torch.zeros(1, 4, 1, 16)\n"
        "flash_attention(x, x, x, return_lse=True)\n"
        "try: flash_attention(x, x, x, impl='triton')\n"
        "except ValueError as error: assert 'triton is not installed' in str(error), error\n"
        "else: raise SystemExit('was not refused')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def qkv(**options):
    return make_qkv(1, 4, 4, 2, 2, 16, dtype=torch.float32, **options)


def test_errors_name_argument_and_value():
    q, k, v = qkv()
    cases = [
        (lambda: flash_attention(q[0], k, v), r"q must be \(B, T, H, D\), got shape \(4, 2, 16\)"),
        (lambda: flash_attention(q, k.half(), v), "q is torch.float32 on cpu, k is torch.float16"),
        (lambda: flash_attention(q, k[..., :8], v[..., :8]), "share batch and head_dim"),
        (lambda: flash_attention(q, k, v[:, :3]), "k and v must have one shape"),
        (lambda: flash_attention(q[:, :, :1], k, v), "a multiple of those of k and v: 1 and 2"),
        (lambda: flash_attention(q.transpose(1, 3), k, v), "must be contiguous, got strides"),
        (lambda: flash_attention(q[:, :0], k, v), "q is empty"),
        (lambda: flash_attention(q.int(), k.int(), v.int()), "fp16, bf16 or fp32, got torch.int32"),
        (lambda: flash_attention(q, k, v, softmax_scale=0.0), "softmax_scale must be positive"),
        (lambda: flash_attention(q, k, v, dropout_p=1.0), r"dropout_p must lie in \[0, 1\), got"),
        (lambda: flash_attention(q, k, v, dropout_p=0.1, impl="reference"), "needs dropout_seed"),
        (lambda: flash_attention(q, k, v, impl="cuda"), "impl must be None or one of"),
        (lambda: flash_attention(q, k, v, impl="sdpa", return_lse=True), "return_lse=True"),
        (lambda: flash_attention(q[:, :3], k, v, impl="sdpa", causal=True), "T_q != T_k"),
        (lambda: flash_attention(q.double(), k.double(), v.double(), impl="triton"), "float64"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
    wide = torch.zeros(1, 4, 1, MAX_HEAD_DIM + 1)
    with pytest.raises(ValueError, match=f"head_dim must be at most {MAX_HEAD_DIM}"):
        flash_attention(wide, wide, wide)


@pytest.mark.parametrize(
    ("seed", "message"),
    [
        (torch.tensor([3.0]), "got torch.float32 of shape (1,) on cpu: pass an int, or torch.tens"),
        (torch.tensor([3], dtype=torch.int32), "got torch.int32 of shape (1,) on cpu: pass an int"),
        (torch.tensor([3, 4]), "got torch.int64 of shape (2,) on cpu: pass an int, or torch.tens"),
        (torch.zeros(1, dtype=torch.int64, device="meta"), "of shape (1,) on meta: pass an int"),
        (0.5, "must be an int or an int64 tensor, got 0.5 (float): convert it with int()"),
        ("7", "must be an int or an int64 tensor, got '7' (str): convert it with int()"),
        (-1, "must lie in [0, 2^63), got -1: take it modulo 2**63"),
        (2**63, "must lie in [0, 2^63), got 9223372036854775808: take it modulo 2**63"),
    ],
    ids=["float", "int32", "two", "elsewhere", "0.5", "str", "negative", "too large"],
)
@pytest.mark.parametrize("impl", [None, "triton", "sdpa", "reference"])
def test_dropout_seed_is_checked(seed, message, impl):
    with pytest.raises(ValueError, match=f"^dropout_seed .*{re.escape(message)}"):
        flash_attention(*qkv(), dropout_p=0.1, dropout_seed=seed, impl=impl)


@pytest.mark.parametrize("seed", [0, 2**63 - 1])
@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_a_dropout_seed_is_an_int_or_a_tensor(seed, impl):
    q, k, v = qkv(device=device_for(torch.float32))

    def drop(seed):
        return flash_attention(q, k, v, dropout_p=0.5, dropout_seed=seed, impl=impl)

    expected = standard_attention(q, k, v, dropout_p=0.5, dropout_seed=seed)[0]
    torch.testing.assert_close(drop(seed), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(drop(torch.tensor(seed, device=q.device)), drop(seed))
    assert torch.equal(drop(torch.tensor([seed], device=q.device)), drop(seed))


def test_triton_without_a_gpu_is_refused():
    code = (
        "import torch; from kernels import flash_attention; x = torch.zeros(1, 4, 1, 16)\n"
        "flash_attention(x, x, x)\n"
        "try: flash_attention(x, x, x, impl='triton')\n"
        "except ValueError as error: assert 'q is on cpu' in str(error), error\n"
        "else: raise SystemExit('was not refused')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"TRITON_INTERPRET": "0"})


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("seq", [1000, 4097])
def test_long_sequences(seq, causal, head_dim, dtype):
    check(1, seq, seq, 2, 1, head_dim, dtype, "cuda", causal=causal, exact_dtype=torch.float64)


@on_gpu
def test_repeats_bit_for_bit():
    q, k, v = make_qkv(4, 1000, 1000, 8, 8, 64, dtype=torch.bfloat16, device="cuda",
                       requires_grad=True)  # fmt: skip
    dout = torch.randn_like(q)

    def once():
        out, lse = triton_attention(q, k, v, causal=True)
        return out, lse, *torch.autograd.grad(out, (q, k, v), dout)

    first = once()
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, once(), strict=True))


@on_gpu
def test_memory_is_linear_in_length():
    def peak(seq):
        q, k, v = make_qkv(1, seq, seq, 4, 4, 64, dtype=torch.bfloat16, device="cuda",
                           requires_grad=True)  # fmt: skip
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        flash_attention(q, k, v, causal=True, impl="triton").sum().backward()
        return torch.cuda.max_memory_allocated() - before

    assert peak(32768) <= 4.1 * peak(8192)
