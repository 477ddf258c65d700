"""Under autocast attention casts its inputs, as scaled_dot_product_attention does."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kernels import flash_attention, flash_attention_packed
from kernels.testing import make_qkv
from tests.kernels.grids import each_of

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHAPE = (2, 37, 37, 4, 2, 16)
# Interpreted kernels have wrong bf16 products.
IMPLS = [
    *(("cpu", impl, BF16) for impl in (None, "sdpa", "reference")),
    ("cpu", "triton", FP16),
]
ON_GPU = [("cuda", impl, BF16) for impl in (None, "hopper", "triton", "sdpa", "reference")]


def results(
    inputs: Sequence[Tensor],
    attend: Callable[..., Tensor] = flash_attention,
    **keywords: object,
) -> list[Tensor]:
    """out and the gradients of the inputs."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = attend(*inputs, causal=True, **keywords)
    dout = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, inputs, dout)]


def assert_bits(got: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


@each_of(["device", "impl", "dtype"], IMPLS, ON_GPU)
@pytest.mark.parametrize("dtypes", [(FP32, FP32, FP32), (FP32, FP32, BF16), (FP16, BF16, FP32)])
def test_inputs_are_cast(device: str, impl: str | None, dtype: torch.dtype, dtypes: tuple) -> None:
    """Models that normalize q and k pass these in fp32, and v in the dtype of autocast."""
    qkv = [
        x.to(own)
        for x, own in zip(make_qkv(*SHAPE, dtype=FP32, device=device), dtypes, strict=True)
    ]
    with torch.autocast(device, dtype):
        got = results(qkv, impl=impl)
        sdpa_out = F.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in qkv), is_causal=True, enable_gqa=True
        )
    out, *gradients = results([x.to(dtype) for x in qkv], impl=impl)
    assert got[0].dtype == sdpa_out.dtype == dtype
    assert_bits(got, [out, *(x.to(own) for x, own in zip(gradients, dtypes, strict=True))])


@each_of(["device", "impl", "dtype"], IMPLS, ON_GPU)
def test_a_packed_input_is_cast(device: str, impl: str | None, dtype: torch.dtype) -> None:
    qkv = torch.randn(2, 37, 3, 4, 16, device=device)
    with torch.autocast(device, dtype):
        got = results([qkv], flash_attention_packed, impl=impl)
    out, gradient = results([qkv.to(dtype)], flash_attention_packed, impl=impl)
    assert_bits(got, [out, gradient.float()])


def test_fp64_and_calls_outside_autocast_keep_their_dtype() -> None:
    qkv = make_qkv(*SHAPE, dtype=torch.float64, device="cpu")
    with torch.autocast("cpu", BF16):
        assert flash_attention(*qkv).dtype == torch.float64
        with torch.autocast("cpu", enabled=False):
            assert flash_attention(*(x.float() for x in qkv)).dtype == FP32
    meta = [x.to("meta") for x in qkv]
    assert flash_attention(*meta, window_size=4).dtype == torch.float64
    with pytest.raises(ValueError, match="q, k and v must share dtype"):
        flash_attention(qkv[0].float(), *qkv[1:])


def test_compiled_calls_cast_the_same() -> None:
    qkv = make_qkv(*SHAPE, dtype=FP32, device="cpu")
    compiled = torch.compile(flash_attention, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", BF16):
        assert_bits(results(qkv, compiled), results(qkv))
