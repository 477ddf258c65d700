"""Forward and backward pass in plain PyTorch against autograd, for all keys or a part of them."""

from typing import Any

import pytest
import torch

from kernels.options import AttentionOptions
from kernels.reference.partial import attn_bwd, attn_fwd
from kernels.reference.standard import standard_attention
from kernels.testing import make_qkv

DOC_START = torch.tensor([[0, 0, 2, 2, 2, 5, 3, 9, 0], [1, 1, 1, 4, 4, 4, 4, 4, 8]])
CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "documents": {"doc_start": DOC_START},
    "causal documents": {"doc_start": DOC_START, "causal": True},
    "softcap": {"softcap": 0.8, "causal": True},
    "window": {"window_size": 3},
    "padding": {"kv_lengths": torch.tensor([0, 5])},
}


@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_passes_match_autograd(name: str, with_dlse: bool) -> None:
    qkv = make_qkv(2, 9, 9, 4, 2, 8, dtype=torch.float64, requires_grad=True)
    options = AttentionOptions(softmax_scale=0.6, **CASES[name])
    expected = standard_attention(*qkv, softmax_scale=0.6, **CASES[name])
    actual = attn_fwd(*qkv, options)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    dout, dlse = (torch.randn_like(x) for x in actual)
    outputs = (expected, (dout, dlse)) if with_dlse else (expected[:1], (dout,))
    grads = tuple(torch.empty_like(x) for x in qkv)
    attn_bwd(dout, dlse if with_dlse else None, *qkv, *actual, options, grads)
    expected_grads = torch.autograd.grad(*outputs[:1], qkv, *outputs[1:])
    torch.testing.assert_close(grads, expected_grads, rtol=0, atol=1e-12)


def test_gradients_of_a_part_of_the_keys_use_out_and_lse_of_all() -> None:
    q, k, v = make_qkv(1, 6, 10, 2, 1, 8, dtype=torch.float64, requires_grad=True)
    out, lse = attn_fwd(q, k, v, AttentionOptions())
    dout = torch.randn_like(out)
    dq, *key_grads = torch.zeros_like(q), torch.empty_like(k), torch.empty_like(v)
    for part in (slice(0, 3), slice(3, 10)):
        dq_part = torch.empty_like(q)
        grads = (dq_part, *(x[:, part] for x in key_grads))
        attn_bwd(dout, None, q, k[:, part], v[:, part], out, lse, AttentionOptions(), grads)
        dq += dq_part
    expected = standard_attention(q, k, v, softmax_scale=1.0)[0]
    expected = torch.autograd.grad(expected, (q, k, v), dout)
    torch.testing.assert_close((dq, *key_grads), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits_are_rounded_at_the_end(dtype: torch.dtype) -> None:
    qkv = make_qkv(1, 9, 9, 2, 2, 8, dtype=dtype)
    wide = tuple(x.float() for x in qkv)
    options = AttentionOptions(causal=True)
    out, lse = attn_fwd(*qkv, options)
    expected, expected_lse = attn_fwd(*wide, options)
    assert torch.equal(out, expected.to(dtype)) and torch.equal(lse, expected_lse)
    grads, wide_grads = (tuple(torch.empty_like(x) for x in xs) for xs in (qkv, wide))
    dout = torch.randn_like(out)
    attn_bwd(dout, None, *qkv, out, lse, options, grads)
    attn_bwd(dout.float(), None, *wide, out.float(), lse, options, wide_grads)
    assert all(torch.equal(x, y.to(dtype)) for x, y in zip(grads, wide_grads, strict=True))
