"""Errors of `flash_attention` that name the argument, and its fallbacks."""

import os
import re
import subprocess
import sys

import pytest
import torch

from kernels import flash_attention, flash_attention_packed
from kernels.attention import IMPLS
from kernels.limits import MAX_HEAD_DIM
from kernels.mask.block_mask import BlockSparseMask
from kernels.reference.standard import standard_attention
from kernels.testing import make_qkv

MASK = BlockSparseMask(torch.ones(1, 1, dtype=torch.bool), 16)


def qkv(**options):
    return make_qkv(1, 4, 4, 2, 2, 16, dtype=torch.float32, **options)


def test_errors_name_argument_and_value():
    q, k, v = qkv()
    cases = [
        (lambda: flash_attention(q[0], k, v), r"q must be \(B, T, H, D\), got shape \(4, 2, 16\)"),
        (lambda: flash_attention(q, k.half(), v), "q is torch.float32 on cpu, k is torch.float16"),
        (lambda: flash_attention(q, k, v.to("meta")), "q is .* on cpu, v is torch.float32 on meta"),
        (lambda: flash_attention(q, k[..., :8], v[..., :8]), "share batch and head_dim"),
        (lambda: flash_attention(q, k, v[:, :3]), "k and v must have one shape"),
        (lambda: flash_attention(q[:, :, :1], k, v), "a multiple of those of k and v: 1 and 2"),
        (lambda: flash_attention(q.transpose(1, 3), k, v), "must be contiguous, got strides"),
        (lambda: flash_attention(q[:, :0], k, v), "q is empty"),
        (lambda: flash_attention(q.int(), k.int(), v.int()), "fp16, bf16 or fp32, got torch.int32"),
        (lambda: flash_attention(q, k, v, impl="cuda"), "impl must be None or one of"),
        (lambda: flash_attention(q, k, v, impl="unfused"), "is now called 'eager'"),
        (lambda: flash_attention(q.double(), k.double(), v.double(), impl="triton"), "float64"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
    wide = torch.zeros(1, 4, 1, MAX_HEAD_DIM + 1)
    with pytest.raises(ValueError, match=f"head_dim must be at most {MAX_HEAD_DIM}, got 257"):
        flash_attention(wide, wide, wide)


@pytest.mark.parametrize("impl", [None, *IMPLS])
@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("softmax_scale", 0.0, "softmax_scale must be positive and finite, got 0.0"),
        ("softmax_scale", float("inf"), "softmax_scale must be positive and finite, got inf"),
        ("softmax_scale", float("nan"), "softmax_scale must be positive and finite, got nan"),
        (
            "window_size",
            0,
            "a whole number of at least 1, got 0. None means no window",
        ),
        ("window_size", 2.5, "window_size .* a whole number of at least 1, got 2.5"),
        ("window_size", -1, "window_size .* a whole number of at least 1, got -1"),
        ("softcap", 0.0, "softcap must be positive and finite, got 0.0. None means no cap"),
        ("softcap", float("inf"), "softcap must be positive and finite, got inf"),
        ("softcap", -5.0, "softcap must be positive and finite, got -5.0"),
        ("dropout_p", 1.0, r"dropout_p must lie in \[0, 1\), got 1.0"),
        ("dropout_p", -0.1, r"dropout_p must lie in \[0, 1\), got -0.1"),
        (
            "doc_start",
            torch.zeros(4, dtype=torch.int32),
            r"doc_start must have shape \(1, 4\) on cpu, to match q \(1, 4, 2, 16\); got \(4,\)",
        ),
        ("doc_start", torch.zeros(1, 4), "doc_start must be int32 or int64, got torch.float32"),
        ("doc_start", torch.zeros(1, 4, device="meta"), r"doc_start .* got \(1, 4\) on meta"),
        ("kv_lengths", torch.tensor([4, 4]), r"kv_lengths must have shape \(1,\) .*got \(2,\)"),
        ("kv_lengths", torch.tensor([True]), "kv_lengths must be int32 or int64, got torch.bool"),
        ("sinks", torch.zeros(1), r"sinks must have shape \(2,\) on cpu.*got \(1,\) on cpu"),
        ("sinks", torch.tensor([1, 2]), "sinks must be floating point, got torch.int64"),
        ("mask", torch.ones(4, 4).bool(), r"mask must be a BlockSparseMask, got Tensor: BlockSp"),
        (
            "mask",
            BlockSparseMask(torch.ones(3, 1, 1, dtype=torch.bool), 16),
            "the layout of mask must have 1 head or the 2 of q, got 3",
        ),
    ],
)
def test_options_are_checked(option, value, message, impl):
    with pytest.raises(ValueError, match=message):
        flash_attention(*qkv(), **{option: value}, impl=impl)


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_a_mask_for_other_lengths_is_refused(impl):
    mask = BlockSparseMask(torch.ones(2, 1, dtype=torch.bool), 16)
    with pytest.raises(ValueError, match=r"seq_q=4 needs .* = 1 blocks.*has n_q_blocks=2"):
        flash_attention(*qkv(), mask=mask, impl=impl)


SDPA_CANNOT = {
    "window_size": {"window_size": 2},
    "mask": {"mask": MASK},
    "doc_start": {"doc_start": torch.zeros(1, 4, dtype=torch.int32)},
    "kv_lengths": {"kv_lengths": torch.tensor([3])},
    "sinks": {"sinks": torch.zeros(2)},
    "softcap": {"softcap": 2.0},
    "dropout_seed": {"dropout_p": 0.1, "dropout_seed": 3},
    "return_lse=True": {"return_lse": True},
}


@pytest.mark.parametrize("name", SDPA_CANNOT)
def test_sdpa_names_unsupported_options(name):
    message = (
        f"impl='sdpa' cannot serve this call: it does not support {name}. impl=None picks an "
        "implementation that can"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        flash_attention(*qkv(), **SDPA_CANNOT[name], impl="sdpa")
    # and None picks one that can
    got = flash_attention(*qkv(), **SDPA_CANNOT[name])
    expected = flash_attention(*qkv(), **SDPA_CANNOT[name], impl="reference")
    torch.testing.assert_close(got, expected)


def test_sdpa_refuses_causal_with_unequal_lengths():
    q, k, v = qkv()
    with pytest.raises(ValueError, match="does not support causal with T_q != T_k"):
        flash_attention(q[:, :3], k, v, impl="sdpa", causal=True)
    expected = standard_attention(q[:, :3], k, v, causal=True)[0]
    torch.testing.assert_close(flash_attention(q[:, :3], k, v, causal=True), expected)


@pytest.mark.gpu
def test_sdpa_refuses_deterministic_on_a_gpu():
    with pytest.raises(ValueError, match="does not support deterministic=True"):
        flash_attention(*qkv(device="cuda"), impl="sdpa", deterministic=True)


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
@pytest.mark.parametrize("impl", [None, *IMPLS])
def test_dropout_seed_is_checked(seed, message, impl):
    with pytest.raises(ValueError, match=f"^dropout_seed .*{re.escape(message)}"):
        flash_attention(*qkv(), dropout_p=0.1, dropout_seed=seed, impl=impl)


@pytest.mark.parametrize("seed", [0, 2**63 - 1])
@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_a_dropout_seed_is_an_int_or_a_tensor(device_for, seed, impl):
    q, k, v = qkv(device=device_for(torch.float32))

    def drop(seed):
        return flash_attention(q, k, v, dropout_p=0.5, dropout_seed=seed, impl=impl)

    expected = standard_attention(q, k, v, dropout_p=0.5, dropout_seed=seed)[0]
    torch.testing.assert_close(drop(seed), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(drop(torch.tensor(seed, device=q.device)), drop(seed))
    assert torch.equal(drop(torch.tensor([seed], device=q.device)), drop(seed))


def test_works_without_triton_and_without_a_gpu():
    # one process for both, as importing torch takes most of the time
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from kernels import flash_attention, triton; x = torch.zeros(1, 4, 1, 16)\n"
        "def assert_refused(reason):\n"
        "    try: flash_attention(x, x, x, impl='triton')\n"
        "    except ValueError as error: assert reason in str(error), error\n"
        "    else: raise SystemExit('was not refused')\n"
        "flash_attention(x, x, x, return_lse=True, window_size=2, sinks=torch.zeros(1))\n"
        "assert_refused('triton is not installed')\n"
        "triton._HAS_TRITON = True\n"
        "assert_refused('q is on cpu')\n"
    )
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("is_causal", "causal"),
        ("scale", "softmax_scale"),
        ("attn_mask", "kv_lengths"),
        ("enable_gqa", "fewer heads"),
        ("cu_seqlens", "doc_start"),
        ("max_seqlen_q", "flash_attn_varlen_func"),
        ("key_padding_mask", "kv_lengths"),
        ("block_mask", "from_flex"),
        ("learnable_sink", "sinks"),
    ],
)
def test_arguments_of_other_packages_are_refused_with_ours(theirs, ours):
    q, k, v = make_qkv(1, 4, 4, 1, 1, 16)
    for function, inputs in (
        (flash_attention, (q, k, v)),
        (flash_attention_packed, (torch.stack((q, k, v), 2),)),
    ):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{theirs}': .*{ours}"):
            function(*inputs, **{theirs: True})


def test_unknown_arguments_are_refused_with_the_valid_ones():
    with pytest.raises(TypeError, match="unexpected keyword argument 'window': it takes causal, "):
        flash_attention(*make_qkv(1, 4, 4, 1, 1, 16), window=3)


@pytest.mark.parametrize(
    ("slopes", "message"),
    [
        (torch.ones(1, 2), "slopes of each sequence are not supported"),
        (torch.ones(3), r"alibi_slopes must have shape \(2,\)"),
        (torch.ones(2, dtype=torch.int64), "alibi_slopes must be floating point"),
        (torch.ones(2, requires_grad=True), "alibi_slopes must not require a gradient"),
    ],
)
def test_slopes_that_cannot_be_used_are_refused(slopes, message):
    for _ in range(2):  # decided, then cached
        with pytest.raises(ValueError, match=message):
            flash_attention(*qkv(), alibi_slopes=slopes)
        flash_attention(*qkv(), alibi_slopes=torch.ones(2))
