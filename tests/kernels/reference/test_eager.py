"""Eager (unfused) attention against the exact reference."""

import pytest
import torch

from kernels import flash_attention
from kernels.reference.standard import standard_attention


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [None, (1, 7)])
@pytest.mark.parametrize(("seq_q", "seq_k"), [(7, 7), (3, 7)])
def test_matches_standard_attention(causal, lengths, seq_q, seq_k):
    torch.manual_seed(0)
    q = torch.randn(2, seq_q, 3, 5, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(2, seq_k, 3, 5, dtype=torch.float64, requires_grad=True) for _ in "kv")
    options = {"causal": causal, "softmax_scale": 0.3}
    if lengths is not None:
        if causal and seq_q < seq_k:
            lengths = (5, 7)  # so that every row sees a key
        options["kv_lengths"] = torch.tensor(lengths)
    out = flash_attention(q, k, v, impl="eager", **options)
    expected, _ = standard_attention(q, k, v, **options)
    torch.testing.assert_close(out, expected)
    weights = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), weights)
    for grad, want in zip(grads, torch.autograd.grad(expected, (q, k, v), weights), strict=True):
        torch.testing.assert_close(grad, want)


def test_dropout_keeps_the_mean():
    torch.manual_seed(0)
    q = k = torch.zeros(1, 400, 1, 1)
    out = flash_attention(q, k, torch.ones(1, 400, 1, 1), impl="eager", dropout_p=0.25)
    assert out.std() > 0
    assert out.mean() == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window_size": 3}, "window_size"),
        ({"return_lse": True}, "return_lse=True"),
        ({"causal": True}, "causal with T_q > T_k"),
    ],
)
def test_unsupported_options_are_named(options, message):
    q, k = torch.randn(1, 5, 2, 4), torch.randn(1, 4, 2, 4)
    with pytest.raises(ValueError, match=f"impl='eager' .* does not support {message}"):
        flash_attention(q, k, k, impl="eager", **options)
