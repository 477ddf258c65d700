import pytest
import torch

pytest.importorskip("triton")

from kernels.fused.triton.sums import add_parts

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("n_parts", "width", "apart"), [(1, 1, 1), (5, 7, 9), (264, 100, 128)])
def test_rows_add_up(n_parts, width, apart, device):
    generator = torch.Generator().manual_seed(0)
    parts = torch.randn(n_parts, apart, generator=generator).to(device)[:, :width]
    for dtype in (torch.float32, torch.bfloat16):
        total = add_parts(parts, dtype)
        assert total.dtype == dtype
        expected = parts.double().sum(0)
        torch.testing.assert_close(total.double(), expected, rtol=1e-2, atol=1e-2)
        if dtype == torch.float32:
            torch.testing.assert_close(total, expected.float(), rtol=1e-5, atol=1e-5)
