"""Unsupported calls of the Hopper kernels are reported without a GPU, and can be compiled."""

from types import SimpleNamespace

import pytest
import torch

from kernels import attention, flash_attention, hopper, ops
from kernels.mask.block_mask import BlockSparseMask
from kernels.testing import make_qkv


@pytest.fixture
def on_hopper(monkeypatch):
    """Make a CPU pass for a Hopper GPU; returns the options of all calls of its kernel."""
    calls = []

    def attn_fwd(q, k, v, options, out):
        calls.append(options)
        return torch.ones_like(q), q.new_zeros(q.shape[0], q.shape[2], q.shape[1]).float()

    monkeypatch.setattr(hopper, "_is_hopper", lambda device: True)
    monkeypatch.setattr(attention, "_DECISIONS", {})
    modules = {"hopper": SimpleNamespace(attn_fwd=attn_fwd)}
    monkeypatch.setattr(ops, "module_of", lambda impl, backward: modules[impl])
    return calls


def call(q, k, v, **options):
    return flash_attention(q, k, v, impl="hopper", **options)


def half(*shape):
    return make_qkv(*shape, dtype=torch.float16)


def test_a_hopper_gpu_is_required():
    with pytest.raises(ValueError, match="q.device=cpu must be an H100 or H200"):
        call(*half(1, 4, 4, 2, 2, 16))


def test_unsupported_inputs_are_named(on_hopper):
    q, k, v = half(1, 4, 4, 2, 2, 16)
    padded = torch.zeros(1, 4, 2, 20).half()[..., :16]
    for inputs, message in (
        ((q.float(), k.float(), v.float()), "q.dtype=torch.float32 must be torch.bfloat16 or"),
        (half(1, 4, 4, 2, 2, 20), "head_dim=20 must be a multiple of 8"),
        ((q, padded, padded), r"k.stride\(\)=\(160, 40, 20, 1\), for shape \(1, 4, 2, 16\)"),
        ((q, k[:, :1].expand(-1, 4, -1, -1), v), r"k.stride\(\)=\(128, 0, 16, 1\).*k.contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            call(*inputs)
    assert not on_hopper


def test_masks_that_waste_most_of_a_tile_are_refused(on_hopper):
    scattered = torch.eye(16, dtype=torch.bool).repeat_interleave(4, 1)[:, ::4]
    for head_dim, block_size, layout, message in (
        (136, 64, scattered, "mask.block_size=64 must be at least 128 with head_dim=136"),
        (
            64,
            32,
            scattered & (torch.arange(16) % 2 == 0),
            "mask.packed_fill=1.00 must be at least 1.75 with block_size=32",
        ),
        (
            64,
            16,
            scattered & (torch.arange(16) % 2 == 0),
            "mask.packed_fill=2.00 must be at least 3.0 with block_size=16",
        ),
    ):
        seq = 16 * block_size
        with pytest.raises(ValueError, match=message):
            call(*half(1, seq, seq, 1, 1, head_dim), mask=BlockSparseMask(layout, block_size))
    assert not on_hopper


def test_masks_of_more_blocks_than_can_be_packed_are_refused(on_hopper):
    q = torch.zeros(1, 16, 1, 8).half()
    k = torch.zeros(1, 2**22 + 16, 1, 8).half()
    mask = BlockSparseMask(torch.ones(1, 2**18 + 1, dtype=torch.bool), 16)
    with pytest.raises(ValueError, match="for 4194320 tokens and must be for at most 4194304"):
        call(q, k, k, mask=mask)
    assert not on_hopper


@pytest.mark.parametrize("block_size", [16, 32])
def test_small_blocks_are_packed(block_size, on_hopper):
    layout = torch.eye(64 // block_size * 3, dtype=torch.bool)
    call(*half(1, 192, 192, 1, 1, 64), mask=BlockSparseMask(layout, block_size))
    (options,) = on_hopper
    assert options.mask_block_size == 64 and options.mask_packed
    parts = {16: 0b1000_0100_0010_0001, 32: 0b1100_1100_0011_0011}[block_size]
    assert options.mask_row_blocks.tolist() == [
        i + (parts << 16) - (parts >> 15 << 32) for i in range(3)
    ]


def test_a_mask_that_hides_nothing_is_dropped(on_hopper):
    ones = torch.ones(4, 4, dtype=torch.bool)
    qkv = half(1, 250, 250, 1, 1, 64)
    call(*qkv, mask=BlockSparseMask(ones, 64))
    call(*qkv, mask=BlockSparseMask(ones.tril(), 64), causal=True)
    call(*qkv, mask=BlockSparseMask(ones.tril(), 64))
    assert [options.mask_block_size for options in on_hopper] == [0, 0, 64]
    assert on_hopper[1].causal


def test_large_blocks_are_listed_in_blocks_of_128(on_hopper):
    mask = BlockSparseMask(torch.eye(4, dtype=torch.bool), 256)
    call(*half(1, 1000, 1000, 1, 1, 64), mask=mask)
    (options,) = on_hopper
    assert options.mask_block_size == 128 and options.mask_row_blocks.numel() == 16


@pytest.mark.parametrize("dynamic", [False, True])
def test_dispatch_compiles_without_a_graph_break(dynamic, on_hopper):
    torch.compiler.reset()
    qkv = torch.zeros(1, 32, 3, 2, 16).half()
    packed = BlockSparseMask(torch.tensor([[True, False], [False, True]]), 16)
    for mask in (None, packed):
        compiled = torch.compile(
            lambda x, mask=mask: call(*x.unbind(2), causal=True, mask=mask),
            fullgraph=True, dynamic=dynamic, backend="aot_eager",
        )  # fmt: skip
        assert torch.equal(compiled(qkv), torch.ones(1, 32, 2, 16).half())
    assert [options.mask_packed for options in on_hopper] == [False, True]
    assert on_hopper[0].causal
