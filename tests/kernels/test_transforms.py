"""torch.func and forward-mode AD: correct, or refused with an error that says what to use."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from kernels import flash_attention
from kernels.fused.cross_entropy import linear_cross_entropy
from kernels.fused.gelu_mlp import gelu_mlp
from kernels.fused.layer_norm import add_layer_norm
from kernels.fused.linear import linear
from kernels.testing import make_qkv

ROWS, TABLE = torch.randn(5, 8), torch.randn(8, 8)
TARGETS = torch.randint(8, (5,))


def rows_of(function: str, x: Tensor) -> Tensor:
    if function == "linear":
        return linear(x, TABLE)
    if function == "gelu_mlp":
        return gelu_mlp(x, TABLE, None, TABLE)
    return linear_cross_entropy(x, TABLE, TARGETS, reduction="none")


def push_forward(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return f(forward_ad.make_dual(x, torch.ones_like(x)))


DERIVATIVES = {
    "torch.func.grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "torch.func.jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "forward-mode AD": push_forward,
}


@pytest.mark.parametrize("function", ["linear", "gelu_mlp", "linear_cross_entropy"])
@pytest.mark.parametrize("name", DERIVATIVES)
def test_operators_refuse_derivatives_by_transforms(function: str, name: str) -> None:
    message = f"{function} does not support {name}: use torch.autograd.grad, or "
    with pytest.raises(RuntimeError, match=message):
        DERIVATIVES[name](partial(rows_of, function), ROWS)


@pytest.mark.parametrize("function", ["linear", "gelu_mlp", "linear_cross_entropy"])
def test_operators_support_vmap(function: str) -> None:
    several = torch.stack([ROWS, ROWS + 1])
    expected = torch.stack([rows_of(function, x) for x in several])
    torch.testing.assert_close(torch.vmap(partial(rows_of, function))(several), expected)


@pytest.mark.parametrize("impl", [None, "reference", "eager"])
def test_pytorch_attention_supports_transforms(impl: str | None) -> None:
    q, k, v = make_qkv(1, 9, 9, 2, 2, 16, dtype=torch.float64, requires_grad=True)

    def f(q: Tensor) -> Tensor:
        return flash_attention(q, k.detach(), v.detach(), causal=True, impl=impl).sin().sum()

    (expected,) = torch.autograd.grad(f(q), q)
    q = q.detach()
    torch.testing.assert_close(torch.func.grad(f)(q), expected)
    torch.testing.assert_close(torch.func.jvp(f, (q,), (q,))[1], (expected * q).sum())
    several = torch.stack([q, 2 * q])
    torch.testing.assert_close(torch.vmap(f)(several), torch.stack([f(q), f(2 * q)]))


def test_sinks_can_be_batched_by_vmap() -> None:
    x, sinks = torch.randn(1, 9, 2, 16), torch.randn(2, 2)

    def f(sinks: Tensor) -> Tensor:
        return flash_attention(x, x, x, sinks=sinks)

    torch.testing.assert_close(torch.vmap(f)(sinks), torch.stack([f(s) for s in sinks]))


@pytest.mark.parametrize("name", [*DERIVATIVES, "torch.func.vmap"])
def test_kernels_of_attention_and_norms_refuse_transforms(name: str) -> None:
    transform = DERIVATIVES.get(name, lambda f, x: torch.vmap(f)(x[None]))
    x = torch.randn(1, 9, 2, 16)
    message = f"impl='triton' cannot serve this call: it does not support {name}.*impl=None picks"
    with pytest.raises(ValueError, match=message):
        transform(lambda x: flash_attention(x, x, x, impl="triton"), x)
    with pytest.raises(ValueError, match=message):
        transform(lambda x: add_layer_norm(x, None, None, TABLE[0], None, impl="triton")[1], ROWS)
