"""Symmetric products, compared with products in fp64."""

from importlib.util import find_spec

import pytest
import torch

from kernels.fused.dispatch import module_of

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
no_triton = pytest.mark.skipif(not find_spec("triton"), reason="needs Triton")
IMPLS = ["reference", pytest.param("triton", marks=no_triton)]
# One element, odd sizes, whole tiles, and several tiles with a last one that is not full.
SHAPES = [(1, 1), (5, 3), (3, 70), (128, 64), (130, 65), (300, 33)]


def random(*shape, device="cpu", seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def tolerance(dtype):
    return {"rtol": 0, "atol": {torch.float32: 1e-5, torch.float16: 4e-3}.get(dtype, 3e-2)}


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("dtype", "device"),
    [
        (torch.float32, "cpu"),  # on a GPU, the kernel takes 16 bits
        (torch.float16, "cpu"),
        pytest.param(torch.float16, "cuda", marks=pytest.mark.gpu),
        pytest.param(torch.bfloat16, "cuda", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("transposed", [False, True])
def test_gram_matrices(shape, transposed, dtype, impl, device):
    y = (random(3, *shape, device=device) / shape[1] ** 0.5).to(dtype)
    if transposed:
        y = y.mT.contiguous().mT
    multiply = module_of(impl, "symmetric").symmetric_product
    gram = y.double() @ y.double().mT
    out = multiply(y, y)
    assert out.dtype == dtype and out.is_contiguous()
    torch.testing.assert_close(out.double(), gram, **tolerance(dtype))
    small = out / 4
    out = multiply(small, small, small, alpha=2.0, beta=-3.0, gamma=0.5)
    small = small.double()
    eye = torch.eye(shape[0], device=device, dtype=torch.float64)
    torch.testing.assert_close(
        out.double(), 2 * small @ small - 3 * small + 0.5 * eye, **tolerance(dtype)
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("size", [1, 7, 130, 260])
def test_products_of_matrices_that_commute(size, impl, device):
    dtype = torch.float32 if device == "cpu" else torch.float16
    x = random(2, size, size, device=device).double() / (2 * size**0.5)
    one = x @ x.mT
    two = one @ one - 2 * one
    out = module_of(impl, "symmetric").symmetric_product(one.to(dtype), two.to(dtype))
    torch.testing.assert_close(out.double(), one @ two, **tolerance(dtype))
