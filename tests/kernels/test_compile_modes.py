"""Every mode of torch.compile gives the bits of an eager call, forward and backward."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels import BlockSparseMask, flash_attention
from kernels.fused.cross_entropy import linear_cross_entropy
from kernels.fused.gelu_mlp import gelu_mlp
from kernels.fused.layer_norm import add_layer_norm
from kernels.mask.patterns import butterfly
from kernels.testing import make_qkv

pytestmark = pytest.mark.gpu
MODES = ["default", "reduce-overhead", "max-autotune"]
LENGTHS = (512, 300, 1000)


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start without compiled code or launch counters: a graph may have to create the first."""
    launch = pytest.importorskip("kernels.hopper.launch")
    torch.compiler.reset()
    monkeypatch.setattr(launch.tile_counters, "_of_stream", {})
    monkeypatch.setattr(launch.tile_counters, "_unused", {})


def documents(seq: int) -> Tensor:
    """doc_start (1, T) of three documents."""
    starts = torch.tensor([0, seq // 5, seq // 2], device="cuda")
    ends = torch.tensor([seq // 5, seq // 2, seq], device="cuda")
    return starts.repeat_interleave(ends - starts)[None]


CALLS: dict[str, Callable[[int], dict]] = {
    "causal": lambda seq: {},
    "mask": lambda seq: {"mask": BlockSparseMask(butterfly(-(-seq // 128)), 128)},
    "dropout, documents": lambda seq: {
        "dropout_p": 0.2,
        "dropout_seed": torch.tensor([seq], device="cuda"),
        "doc_start": documents(seq),
    },
}


def gradients(f: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> list[Tensor]:
    """Outputs of f and gradients of its inputs, copied before the next replay."""
    outputs = f(*inputs)
    generator = torch.Generator("cuda").manual_seed(1)
    douts = [torch.randn(x.shape, generator=generator, device="cuda").to(x) for x in outputs]
    grads = torch.autograd.grad(outputs, inputs, douts)
    return [x.detach().clone() for x in (*outputs, *grads)]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("impl", ["hopper", "triton"])
@pytest.mark.parametrize("mode", MODES)
def test_attention(mode: str, impl: str, name: str) -> None:
    """Call each of three lengths until a CUDA graph is warmed up, recorded and replayed."""

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, **options) -> tuple[Tensor, Tensor]:
        return flash_attention(
            q, k, v, causal=True, sinks=sinks, return_lse=True, impl=impl, **options
        )

    compiled = torch.compile(attend, mode=mode)
    for seq in LENGTHS:
        options = CALLS[name](seq)
        qkv = make_qkv(1, seq, seq, 4, 2, 64, dtype=torch.bfloat16, device="cuda")
        sinks = torch.linspace(-1, 1, 4, device="cuda")
        inputs = [x.detach().requires_grad_() for x in (*qkv, sinks)]
        steps = []
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            steps.append(gradients(lambda *x, o=options: compiled(*x, **o), *inputs))
        # Eager comes last: the graph has to create the counters and block lists itself.
        expected = gradients(lambda *x, o=options: attend(*x, **o), *inputs)
        for got in steps:
            # PyTorch computes the gradient of the sinks, and may fuse its sums
            for a, b in zip(got[:-1], expected[:-1], strict=True):
                assert torch.equal(a, b)
            torch.testing.assert_close(got[-1], expected[-1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", MODES[1:])
def test_the_other_operators(mode: str) -> None:
    """The MLP, whose gemms take tiles from the same counters, the norm and the loss."""
    C, V = 128, 512
    weights = [
        torch.randn(*shape, device="cuda").mul(0.05).requires_grad_()
        for shape in ((4 * C, C), (4 * C,), (C, 4 * C), (V, C), (C,), (C,))
    ]

    def block(x: Tensor, targets: Tensor, *weights: Tensor) -> tuple[Tensor]:
        w_in, b_in, w_out, head, weight, bias = weights
        with torch.autocast("cuda", torch.bfloat16):
            x, y = add_layer_norm(x, gelu_mlp(x, w_in, b_in, w_out), None, weight, bias)
            return (linear_cross_entropy(x + y, head, targets),)

    compiled = torch.compile(block, mode=mode)
    for rows in LENGTHS:
        x = torch.randn(rows, C, device="cuda", dtype=torch.bfloat16)
        targets = torch.randint(V, (rows,), device="cuda")
        steps = []
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            steps.append(gradients(lambda *w, x=x, t=targets: compiled(x, t, *w), *weights))
        expected = gradients(lambda *w, x=x, t=targets: block(x, t, *w), *weights)
        for got in steps:
            for a, b in zip(got, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-3)
