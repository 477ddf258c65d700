"""Tiles read through TMA descriptors and through pointers hold the same numbers."""

import pytest
import torch

from kernels import flash_attention
from kernels.mask.block_mask import BlockSparseMask
from kernels.mask.patterns import butterfly
from kernels.testing import make_qkv, poison_empty

operands = pytest.importorskip("kernels.triton.operands")


def calls(block_size):
    """Options for 3 to 4 blocks of queries and 4 of keys."""
    everything = {
        "causal": True,
        "window_size": 3 * block_size // 2,
        "softcap": 15.0,
        "dropout_p": 0.1,
        "dropout_seed": 1,
        "mask": BlockSparseMask(butterfly(4), block_size),
    }
    return {"causal": {"causal": True}, "full": {}, "everything": everything}


def is_descriptor(x):
    return isinstance(operands.operand(x, 64, 64, described=True), operands.TensorDescriptor)


def results(q, k, v, **options):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with poison_empty():
        out, lse = flash_attention(*leaves, impl="triton", return_lse=True, **options)
        return out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), leaves)


def check_equal_bits(device, seq_q, seq_k, head_dim, options, monkeypatch):
    q, k, v = make_qkv(1, seq_q, seq_k, 2, 1, head_dim, dtype=torch.float16, device=device)
    assert all(is_descriptor(x) for x in (q, k, v))
    work = 2 * seq_q * head_dim * seq_k
    monkeypatch.setattr(operands, "MIN_TMA_WORK", work)
    assert operands.worth_describing(q, k)
    through_tma = results(q, k, v, **options)
    monkeypatch.setattr(operands, "MIN_TMA_WORK", work + 1)
    assert not operands.worth_describing(q, k)
    through_pointers = results(q, k, v, **options)
    for name, a, b in zip(
        ("out", "lse", "dq", "dk", "dv"), through_tma, through_pointers, strict=True
    ):
        assert a.isfinite().any() and torch.equal(a, b), name


@pytest.mark.parametrize("options", calls(32).values(), ids=calls(32))
def test_descriptors_and_pointers_give_equal_bits(options, monkeypatch):
    check_equal_bits("cpu", 100, 128, 40, options, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [40, 64, 128, 256])
@pytest.mark.parametrize("options", calls(64).values(), ids=calls(64))
def test_descriptors_and_pointers_give_equal_bits_on_a_gpu(options, head_dim, monkeypatch):
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("no TMA before Hopper")
    check_equal_bits("cuda", 200, 256, head_dim, options, monkeypatch)


@pytest.mark.skipif(not operands.is_interpreted(), reason="does not ask a GPU for its capability")
def test_tensors_that_tma_cannot_address_use_pointers():
    wide = torch.zeros(2, 8, 3, 72, dtype=torch.float16)
    assert is_descriptor(wide) and is_descriptor(wide[..., 8:])
    assert not is_descriptor(wide[..., 4:])  # starts at 8 bytes
    assert not is_descriptor(torch.zeros(2, 8, 3, 20, dtype=torch.float16))  # rows of 40 bytes
    assert not is_descriptor(wide[:, :, :1].expand(-1, -1, 3, -1))  # a stride of 0
    assert not is_descriptor(wide.float())
