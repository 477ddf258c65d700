"""Values at the limits of their dtypes."""

import math

import pytest
import torch

from kernels import flash_attention
from kernels.testing import make_qkv


@pytest.mark.parametrize(
    "impl", ["triton", "reference", pytest.param("hopper", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("beyond", [2**31, 2**32, 2**32 + 3, 2**62])
def test_positions_past_int32_do_not_wrap_around(device_for, impl, beyond):
    device = device_for(impl)
    dtype = torch.float16 if impl == "hopper" else torch.float32
    q, k, v = make_qkv(2, 5, 7, 1, 1, 64, dtype=dtype, device=device)

    def run(**positions):
        tensors = {name: torch.tensor(value, device=device) for name, value in positions.items()}
        return flash_attention(q, k, v, impl=impl, **tensors)

    assert torch.equal(run(kv_lengths=[beyond, 3]), run(kv_lengths=[7, 3]))
    assert torch.equal(run(kv_lengths=[-beyond, 3]), run(kv_lengths=[0, 3]))
    starts = [[0, 0, 2, beyond, 3], [-beyond, 0, 0, 6, 7]]
    clamped = [[0, 0, 2, 7, 3], [0, 0, 0, 6, 7]]
    assert torch.equal(run(doc_start=starts), run(doc_start=clamped))


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_scores_that_fp16_cannot_hold(device_for, impl):
    device = device_for(impl)
    q, k, v = make_qkv(1, 20, 20, 1, 1, 64, dtype=torch.float16, device=device)
    out, lse = flash_attention(40 * q, 40 * k, v, softmax_scale=10.0, impl=impl, return_lse=True)
    exact, exact_lse = flash_attention(
        40 * q.float(), 40 * k.float(), v.float(), softmax_scale=10.0, impl=impl, return_lse=True
    )
    assert lse.max() > 65_504
    torch.testing.assert_close(lse, exact_lse, rtol=1e-3, atol=1)
    torch.testing.assert_close(out.float(), exact, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("impl", ["reference", "sdpa", "eager"])
def test_the_output_has_the_dtype_of_autocast(impl):
    q, k, v = make_qkv(1, 4, 4, 1, 1, 16, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert flash_attention(q, k, v, impl=impl).dtype == torch.bfloat16


def test_an_infinite_sink_is_refused():
    q, k, v = make_qkv(1, 4, 4, 2, 2, 16, dtype=torch.float32)
    sinks = torch.tensor([0.0, math.inf])
    with pytest.raises(ValueError, match=r"sinks must be below \+inf, .*got \[0.0, inf\]"):
        flash_attention(q, k, v, sinks=sinks)
    none = flash_attention(q, k, v, sinks=torch.full((2,), -math.inf))
    torch.testing.assert_close(none, flash_attention(q, k, v))
