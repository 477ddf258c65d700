"""Tiles read through TMA descriptors and through pointers hold the same numbers."""

import pytest
import torch

from kernels import flash_attention
from kernels.testing import make_qkv, poison_empty

operands = pytest.importorskip("kernels.operands")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def is_descriptor(x):
    return isinstance(operands.operand(x, 64, 64), operands.TensorDescriptor)


def results(q, k, v, **options):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with poison_empty():
        out, lse = flash_attention(*leaves, impl="triton", return_lse=True, **options)
        return out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), leaves)


def test_descriptors_and_pointers_agree(monkeypatch):
    if DEVICE == "cuda" and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("no TMA before Hopper")
    qkv = make_qkv(1, 150, 150, 2, 1, 40, dtype=torch.float16, device=DEVICE)
    monkeypatch.setattr(operands, "SHORTEST_DESCRIBED", 1)
    assert all(is_descriptor(x) for x in qkv)
    through_tma = results(*qkv, causal=True)
    monkeypatch.setattr(operands, "SHORTEST_DESCRIBED", 151)
    assert not any(is_descriptor(x) for x in qkv)
    for name, got, want in zip(
        ("out", "lse", "dq", "dk", "dv"), through_tma, results(*qkv, causal=True), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.skipif(not operands.INTERPRETED, reason="asks no GPU for its capability")
def test_what_tma_cannot_address_goes_through_pointers(monkeypatch):
    monkeypatch.setattr(operands, "SHORTEST_DESCRIBED", 4)
    wide = torch.zeros(2, 8, 3, 72, dtype=torch.float16)
    assert is_descriptor(wide) and is_descriptor(wide[..., 8:])
    assert not is_descriptor(wide[..., 4:])  # starts at 8 bytes
    assert not is_descriptor(torch.zeros(2, 8, 3, 20, dtype=torch.float16))  # rows of 40 bytes
    assert not is_descriptor(wide[:, :, :1].expand(-1, -1, 3, -1))  # a stride of 0
    assert not is_descriptor(wide.float())
    assert not is_descriptor(wide[:, :3])  # short
