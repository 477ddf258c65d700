"""Promises of the kernels that need a GPU: equal bits, linear memory, no recompilation."""

from functools import partial

import pytest
import torch

from kernels import flash_attention
from kernels.mask.block_mask import BlockSparseMask
from kernels.mask.patterns import butterfly
from kernels.testing import check_attention, make_qkv

pytestmark = pytest.mark.gpu
triton_attention = partial(flash_attention, impl="triton", return_lse=True)


def butterfly_mask(seq, block_size=128):
    return BlockSparseMask(butterfly(-(-seq // block_size)), block_size)


def bf16(*shape):
    return make_qkv(*shape, dtype=torch.bfloat16, device="cuda", requires_grad=True)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mask", [None, butterfly_mask(1000)], ids=["dense", "butterfly"])
@pytest.mark.usefixtures("copy_engines")
def test_repeats_bit_for_bit(attention, mask, head_dim):
    qkv = bf16(4, 1000, 1000, 8, 4, head_dim)
    sinks = torch.randn(8, device="cuda", requires_grad=True)
    dout = torch.randn_like(qkv[0])

    def once():
        out, lse = attention(*qkv, causal=True, mask=mask, sinks=sinks, deterministic=True)
        return out, lse, *torch.autograd.grad((out, lse), (*qkv, sinks), (dout, lse))

    first = once()
    for repeat in range(250):
        for name, a, b in zip(
            ("out", "lse", "dq", "dk", "dv", "dsinks"), first, once(), strict=True
        ):
            assert torch.equal(a, b), (name, repeat)


@pytest.mark.parametrize(
    ("impl", "options", "gradients_too"),
    [
        ("triton", {"causal": True}, True),
        ("hopper", {}, True),
        ("hopper", {"causal": True, "mask": butterfly_mask(1000)}, True),
        ("hopper", {"causal": True}, False),  # the order of its additions depends on B * H
        ("hopper", {"causal": True, "window_size": 200}, False),
    ],
)
def test_a_sequence_has_the_same_bits_in_any_batch(impl, options, gradients_too):
    def results(q, k, v, dout):
        qkv = [x.detach().requires_grad_() for x in (q, k, v)]
        out, lse = flash_attention(*qkv, return_lse=True, impl=impl, **options)
        gradients = torch.autograd.grad(out, qkv, dout)
        return out, lse, *(gradients if gradients_too else ())

    inputs = [x.detach() for x in bf16(5, 1000, 1000, 8, 4, 64)]
    inputs.append(torch.randn_like(inputs[0]))
    whole = results(*inputs)
    for i in range(5):
        for batched, alone in zip(whole, results(*(x[i : i + 1] for x in inputs)), strict=True):
            assert torch.equal(batched[i : i + 1], alone)


@pytest.mark.parametrize("pattern", ["dense", "butterfly"])
def test_memory_is_linear_in_length(attention, pattern):
    def peak(seq):
        qkv = bf16(1, seq, seq, 4, 4, 64)
        mask = butterfly_mask(seq) if pattern == "butterfly" else None
        if mask is not None:
            for dq_schedule in (False, True):  # made once, kept with the mask
                mask.lists(seq, seq, causal=True, dq_schedule=dq_schedule, device="cuda")
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        attention(*qkv, causal=True, mask=mask)[0].sum().backward()
        return torch.cuda.max_memory_allocated() - before

    longest = 65536 if pattern == "butterfly" else 32768
    assert peak(longest) <= 1.03 * (longest // 8192) * peak(8192)


def test_lists_of_a_mask_stay_small():
    # 64K tokens: 512 blocks, 10 of them in each row; far less than a bit per pair of blocks
    before = torch.cuda.memory_allocated()
    mask = butterfly_mask(65536)
    lists = mask.lists(65536, 65536, causal=True, dq_schedule=True, device="cuda")
    assert lists.n_full + lists.n_partial == 512 + 9 * 512 // 2
    assert torch.cuda.memory_allocated() - before < 2**17


def compiled_kernels():
    from kernels.triton.bwd_dkdv import attn_bwd_dkdv_kernel
    from kernels.triton.bwd_dq import attn_bwd_dq_kernel
    from kernels.triton.fwd import attn_fwd_kernel

    # The first entry of a device's caches maps the specialization of a kernel to its binary.
    device = torch.cuda.current_device()
    kernels = (attn_fwd_kernel, attn_bwd_dq_kernel, attn_bwd_dkdv_kernel)
    return [len(kernel.device_caches[device][0]) for kernel in kernels]


# lengths that kernels/triton/tiles.py treats as short, and longer ones
@pytest.mark.parametrize("lengths", [(600, 601, 640, 1000, 1279), (1281, 4097, 8000)])
@pytest.mark.parametrize("least_work", [1, 2**62], ids=["descriptors", "pointers"])
@pytest.mark.parametrize("option", ["causal", "documents", "butterfly"])
def test_another_length_does_not_compile_again(option, least_work, lengths, monkeypatch):
    monkeypatch.setattr("kernels.triton.operands.MIN_TMA_WORK", least_work)

    def call(seq):
        options = {"causal": True}
        if option == "documents":
            options["doc_start"] = torch.zeros(1, seq, dtype=torch.int32, device="cuda")
        if option == "butterfly":
            options["mask"] = butterfly_mask(seq)
        out, lse = triton_attention(*bf16(1, seq, seq, 2, 2, 64), **options)
        (out.sum() + lse.sum()).backward()

    call(lengths[0])
    before = compiled_kernels()
    assert all(before)
    for seq in lengths[1:]:
        call(seq)
        assert compiled_kernels() == before, seq


@pytest.mark.parametrize("used", ["nothing", "all but a mask", "all"])
def test_no_call_waits_for_the_gpu(attention, used):
    qkv = bf16(2, 500, 500, 4, 2, 64)
    options = {
        "doc_start": torch.zeros(2, 500, dtype=torch.int32, device="cuda"),
        "kv_lengths": torch.tensor([500, 400], device="cuda"),
        "sinks": torch.zeros(4, device="cuda"),
        "dropout_p": 0.1,
        "dropout_seed": 1,
    }
    if used == "nothing":
        options = {}
    elif used == "all":
        options["mask"] = butterfly_mask(500)

    def step():
        out, lse = attention(*qkv, causal=True, **options)
        (out.sum() + lse.sum()).backward()

    step()  # compiles, and copies the lists of the mask to the GPU
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("operand", ["q", "k", "v", "all"])
@pytest.mark.parametrize("seq", [1100, 4097])
@pytest.mark.usefixtures("copy_engines")
def test_operands_that_the_copy_engine_cannot_read(operand, seq):
    # one element off a 16-byte boundary, or a row stride that is not a multiple of 16 bytes
    def normal(name, offset, columns):
        if operand not in (name, "all"):
            offset, columns = 0, 64
        rows = torch.randn(1, seq, 2, columns, dtype=torch.bfloat16, device="cuda")
        return rows[..., offset : offset + 64]

    for offset, columns in ((1, 72), (0, 65)):
        qkv = [normal(name, offset, columns) for name in "qkv"]
        errors = check_attention(triton_attention, *qkv, causal=True, with_dlse=True)
        assert errors["out"] < 0.01
        contiguous = [x.contiguous() for x in qkv]
        for a, b in zip(
            triton_attention(*qkv, causal=True),
            triton_attention(*contiguous, causal=True),
            strict=True,
        ):
            torch.testing.assert_close(a, b)
