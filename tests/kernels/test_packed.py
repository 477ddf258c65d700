"""Attention of q, k and v in one tensor: the results of three tensors, and one gradient."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

from kernels import BlockSparseMask, flash_attention, flash_attention_packed
from kernels.mask.patterns import butterfly
from kernels.options import N_OPERATOR_OPTIONS, AttentionOptions
from tests.kernels.grids import each_of

on_gpu = pytest.mark.gpu
CALLS = {
    "full": {},
    "causal": {"causal": True},
    "dropout": {"causal": True, "dropout_p": 0.3, "dropout_seed": 5},
    "documents": {"causal": True, "doc_start": torch.tensor([[0] * 20 + [20] * 33] * 2)},
    "mask": {"mask": BlockSparseMask(butterfly(4), 16)},
}


def results(attend, qkv, sinks, **options):
    """out, and the gradients of qkv and of the sinks."""
    qkv, sinks = (x.detach().requires_grad_() for x in (qkv, sinks))
    out = attend(qkv, sinks=sinks, **options)
    generator = torch.Generator().manual_seed(1)
    dout = torch.randn(out.shape, generator=generator).to(out)
    return out.detach(), *torch.autograd.grad(out, (qkv, sinks), dout)


def unpacked(qkv, **options):
    return flash_attention(*qkv.unbind(2), **options)


def packed_input(dtype, device, head_dim=16):
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(2, 53, 3, 4, head_dim, generator=generator)
    return qkv.to(device, dtype), torch.randn(4, generator=generator).to(device)


@each_of(
    ["impl", "name", "dtype", "device"],
    [
        (impl, name, torch.float32, "cpu")
        for impl in ("triton", "reference")
        for name in ("full", "dropout")
    ],
    [(impl, name, torch.bfloat16, "cuda") for impl in ("triton", "hopper") for name in CALLS],
)
@pytest.mark.parametrize("head_dim", [16, 64])
def test_packed_gives_the_same_bits(impl, name, dtype, device, head_dim):
    qkv, sinks = packed_input(dtype, device, head_dim)
    if impl == "hopper" and name == "mask":
        pytest.skip("only the portable kernels support blocks of 16 in so short a sequence")
    options = {
        key: x.to(device) if isinstance(x, torch.Tensor) else x for key, x in CALLS[name].items()
    }
    expected = results(unpacked, qkv, sinks, impl=impl, **options)
    actual = results(flash_attention_packed, qkv, sinks, impl=impl, **options)
    assert all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))


def test_without_kernels_pytorch_is_used():
    qkv, _ = packed_input(torch.float32, "cpu")
    assert torch.equal(
        flash_attention_packed(qkv, causal=True), unpacked(qkv, causal=True, impl="sdpa")
    )


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_log_sum_exp_matches_three_tensors(impl):
    qkv, _ = packed_input(torch.float32, "cuda" if torch.cuda.is_available() else "cpu")
    options = {"causal": True, "impl": impl, "return_lse": True}
    actual, expected = flash_attention_packed(qkv, **options), unpacked(qkv, **options)
    assert all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))


@each_of(["device", "backend"], [("cpu", "aot_eager")], [("cuda", "inductor")])
def test_compiles_without_a_graph_break(device, backend):
    qkv, sinks = packed_input(torch.float32, device)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(flash_attention_packed, backend=counter, fullgraph=True)
    expected = results(flash_attention_packed, qkv, sinks, causal=True, impl="triton")
    actual = results(compiled, qkv, sinks, causal=True, impl="triton")
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y)
    assert counter.frame_count == 1


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_gpu)])
def test_operators_are_well_registered(device):
    qkv, sinks = packed_input(torch.float32, device)
    options = AttentionOptions(causal=True, sinks=sinks)[:N_OPERATOR_OPTIONS]
    qkv.requires_grad_()
    operators = torch.ops.papilio
    torch.library.opcheck(operators.attn_packed_fwd.default, (qkv, "triton", *options))
    out, lse = (x.detach() for x in operators.attn_packed_fwd(qkv, "triton", *options))
    inputs = (torch.randn_like(out), None, qkv.detach(), out, lse, "triton", *options)
    torch.library.opcheck(operators.attn_packed_bwd.default, inputs)


def test_flops_match_three_tensors():
    counts = []
    for attend in (flash_attention_packed, unpacked):
        qkv = torch.empty(2, 53, 3, 4, 16, device="meta", requires_grad=True)
        with FlopCounterMode(display=False) as counter:
            attend(qkv, causal=True, impl="triton").sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_errors_name_argument_and_value():
    qkv, _ = packed_input(torch.float32, "cpu")
    with pytest.raises(ValueError, match=r"qkv must be \(B, T, 3, H, D\), got shape \(2, 53, 3, 4"):
        flash_attention_packed(qkv[..., 0])
    with pytest.raises(ValueError, match=r"got shape \(2, 53, 2, 4, 16\)"):
        flash_attention_packed(qkv[:, :, :2])
    with pytest.raises(ValueError, match="window_size must be the number of keys .* got 0"):
        flash_attention_packed(qkv, window_size=0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'window'"):
        flash_attention_packed(qkv, window=3)
