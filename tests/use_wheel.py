"""The wheel in an environment with its dependencies only, with Triton's interpreter.

The checkout must not be importable: run `python -P tests/use_wheel.py` from another directory.
"""

import importlib.util

import torch
from torch.nn.functional import scaled_dot_product_attention

import papilio
from papilio.flash_attn import flash_attn_func
from papilio.kernels import BlockSparseMask, butterfly, flash_attention

for name in ("kernels", "configs", "data", "model", "train", "training", "scripts"):
    assert importlib.util.find_spec(name) is None, name

q, k, v = (torch.randn(1, 64, 2, 16, requires_grad=True) for _ in range(3))
heads_first = [x.transpose(1, 2) for x in (q, k, v)]


def with_gradients(out: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (out, *torch.autograd.grad(out.square().sum(), (q, k, v)))


def assert_equals(expected: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
    for got, wanted in zip(with_gradients(out), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


pytorch = scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)
dense = with_gradients(pytorch)
for impl in (None, "triton", "reference"):
    assert_equals(dense, flash_attention(q, k, v, causal=True, impl=impl))
assert_equals(dense, flash_attn_func(q, k, v, causal=True))

mask = BlockSparseMask(butterfly(4), block_size=16)
sparse = with_gradients(flash_attention(q, k, v, causal=True, mask=mask, impl="reference"))
assert_equals(sparse, flash_attention(q, k, v, causal=True, mask=mask, impl="triton"))

papilio.register_with_torch()
registered = scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)
assert_equals(dense, registered)
papilio.unregister_with_torch()
