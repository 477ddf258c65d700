"""Matrix products with a result of higher precision than their factors."""

import pytest
import torch

from kernels.fused.matmul import addmm_, matmul

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def factors(dtype, device):
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(*shape, generator=generator) for shape in ((24, 40), (40, 16)))
    return a.to(device, dtype), b.to(device, dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "wide"),
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float32,) * 2],
)
def test_a_product_is_not_rounded_to_the_dtype_of_its_factors(dtype, wide, device):
    a, b = factors(dtype, device)
    exact = a.double() @ b.double()
    torch.testing.assert_close(matmul(a, b, wide).double(), exact, atol=1e-4, rtol=1e-5)
    total = torch.ones_like(exact, dtype=wide)
    addmm_(total, a, b)
    torch.testing.assert_close(total.double(), exact + 1, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_without_accumulate_the_total_is_overwritten(dtype, device):
    a, b = factors(dtype, device)
    total = torch.full((24, 16), torch.nan, device=device)
    addmm_(total, a, b, accumulate=False)
    assert torch.equal(total, matmul(a, b, torch.float32))
