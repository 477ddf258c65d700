"""The inputs and the error budget that tests and benchmarks of attention share."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.reference.standard import standard_attention
from kernels.reference.tiled import flash_attention_2_backward, flash_attention_2_forward
from kernels.testing import (
    assert_within_budget,
    check_attention,
    make_qkv,
    poison_empty,
    relative_error,
)


class _FlashAttention2(torch.autograd.Function):
    """Second oracle with the signature that `check_attention` takes, and faults to inject."""

    fault = ""

    @staticmethod
    def call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        return _FlashAttention2.apply(q, k, v, options)  # type: ignore[return-value]

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        out, lse = flash_attention_2_forward(q, k, v, block_m=16, block_n=16, **options)
        fault = _FlashAttention2.fault
        if fault == "out one row":
            out[0, -1, 0] *= 1.1
        if fault == "lse in base 2":
            lse = lse / math.log(2)
        if fault == "lse in bf16":
            lse = lse.bfloat16().float()
        if fault == "NaN":
            out[0, 0, 0, 0] = math.nan
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = options
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dout, dlse = grads
        q, k, v, out, lse = ctx.saved_tensors
        if _FlashAttention2.fault == "no dlse":
            dlse = torch.zeros_like(dlse)
        dq, dk, dv = flash_attention_2_backward(
            q, k, v, out, lse, dout, dlse=dlse, block_m=16, block_n=16, **ctx.options
        )
        if _FlashAttention2.fault == "dk one tile":
            dk[:, -1:] = 0
        return dq, dk, dv, None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("seq_q", "seq_k"), [(1, 1), (65, 1), (63, 65), (65, 63)])
@pytest.mark.parametrize("causal", [False, True])
def test_tiled_oracle_is_within_budget(
    seq_q: int, seq_k: int, causal: bool, dtype: torch.dtype
) -> None:
    q, k, v = make_qkv(2, seq_q, seq_k, 4, 2, 32, dtype=dtype)
    errors = check_attention(_FlashAttention2.call, q, k, v, causal=causal, with_dlse=True)
    assert set(errors) >= {"out", "lse", "dq", "dk", "dv"}
    assert errors["dv"] < 10 * torch.finfo(dtype).eps


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("out one row", "out"),
        ("lse in base 2", "lse"),
        ("lse in bf16", "lse"),
        ("NaN", "out"),
        ("no dlse", "dq"),
        ("dk one tile", "dk"),
    ],
)
def test_budget_finds_faults(monkeypatch: pytest.MonkeyPatch, fault: str, name: str) -> None:
    monkeypatch.setattr(_FlashAttention2, "fault", fault)
    q, k, v = make_qkv(2, 65, 65, 4, 2, 32, dtype=torch.bfloat16)
    with pytest.raises(AssertionError, match=rf"^{name}: max error \S+ exceeds the budget"):
        check_attention(_FlashAttention2.call, q, k, v, with_dlse=True)


@pytest.mark.parametrize("fault", ["", "no gradient", "of one query", "of the other head"])
def test_budget_covers_the_gradient_of_sinks(fault: str) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor) -> tuple[Tensor, Tensor]:
        results = standard_attention(q, k, v, sinks=sinks)
        if fault == "no gradient":
            results = standard_attention(q, k, v, sinks=sinks.detach() + 0 * sinks)
        if fault == "of one query":
            others = standard_attention(q[:, 1:], k, v, sinks=sinks)
            first = standard_attention(q[:, :1], k, v, sinks=sinks.detach())
            results = torch.cat((first[0], others[0]), 1), torch.cat((first[1], others[1]), 2)
        if fault == "of the other head":
            swapped = sinks.detach() + sinks.flip(0) - sinks.flip(0).detach()
            results = standard_attention(q, k, v, sinks=swapped)
        return results

    q, k, v = make_qkv(2, 20, 20, 4, 2, 16, dtype=torch.float32)
    sinks = torch.tensor([0.5, -1.0, 3.0, 0.0])
    if not fault:
        assert "dsinks" in check_attention(attention, q, k, v, sinks=sinks, with_dlse=True)
        return
    with pytest.raises(AssertionError, match=r"^dsinks: max error \S+ exceeds the budget"):
        check_attention(attention, q, k, v, sinks=sinks, with_dlse=True)


class _FromRoundedOut(torch.autograd.Function):
    """Round out to bf16; dsinks follows from the rounded out, as in a kernel, all else is exact."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
        rounded = out.bfloat16()
        ctx.save_for_backward(rounded.double() - out, (sinks[:, None] - lse).exp())
        return rounded

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, Tensor]:
        error, p = ctx.saved_tensors
        delta = (error * grads[0]).sum(-1).transpose(1, 2)
        return grads[0].double(), None, -(p * delta).sum((0, 2))


@pytest.mark.parametrize("seed", range(20))
def test_budget_allows_dsinks_from_a_rounded_out(seed: int) -> None:
    # with one head, plain PyTorch's error is one number, which may be small by chance
    def attention(q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor) -> tuple[Tensor, Tensor]:
        exact_sinks = sinks.double()
        out, lse = standard_attention(q.double(), k.double(), v.double(), sinks=exact_sinks)
        out = _FromRoundedOut.apply(out, lse.detach(), exact_sinks)
        return out, lse.float()  # type: ignore[return-value]

    q, k, v = make_qkv(1, 20, 20, 1, 1, 16, dtype=torch.bfloat16, seed=seed)
    check_attention(attention, q, k, v, sinks=torch.tensor([0.5]), seed=seed)


class _DqFromRoundedOut(torch.autograd.Function):
    """Round out to bf16; the error of delta goes into dq, times scale and the one key."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, q: Tensor, key: Tensor, scale: float) -> Tensor:
        rounded = out.bfloat16()
        ctx.save_for_backward(rounded.double() - out, key)
        ctx.scale = scale
        return rounded

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        error, key = ctx.saved_tensors
        delta = (error * grads[0]).sum(-1, keepdim=True)
        return grads[0].double(), -ctx.scale * delta * key, None, None


@pytest.mark.parametrize("seed", range(5))
def test_budget_allows_dq_from_a_rounded_out(seed: int) -> None:
    # dropout keeps 1.25 times the value of the one key, or nothing: dq is 0, also in plain PyTorch
    def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        out, lse = standard_attention(q.double(), k.double(), v.double(), **options)
        out = _DqFromRoundedOut.apply(out, q.double(), k.double(), 0.25)
        return out, lse.float()  # type: ignore[return-value]

    q, k, v = make_qkv(1, 20, 1, 1, 1, 16, dtype=torch.bfloat16, seed=seed)
    check_attention(attention, q, k, v, seed=seed, dropout_p=0.2, dropout_seed=seed)


def test_budget_message_and_infinities() -> None:
    exact = torch.tensor([1.0, -math.inf], dtype=torch.float64)
    half = torch.tensor([1.01, -math.inf], dtype=torch.float16)
    assert_within_budget(half, half, exact, factor=1.0, name="lse")
    for wrong in ([1.1, -math.inf], [1.0, 0.0], [1.0, math.nan], [1.0, math.inf]):
        with pytest.raises(AssertionError, match="lse: max error"):
            assert_within_budget(torch.tensor(wrong).half(), half, exact, factor=2.0, name="lse")
    # a reference that overflowed leaves no budget, rather than an infinite one
    overflowed_half = torch.tensor([math.inf, -math.inf])
    with pytest.raises(AssertionError, match="budget inf"):
        assert_within_budget(half, overflowed_half, exact, factor=2.0, name="lse")
    with pytest.raises(AssertionError, match="shape"):
        assert_within_budget(half[:1], half, exact, factor=2.0, name="lse")


def test_relative_error() -> None:
    exact = torch.tensor([3.0, 4.0, -math.inf])
    assert relative_error(exact, exact) == 0
    assert relative_error(torch.tensor([3.0, 4.5, -math.inf]), exact) == pytest.approx(0.1)
    assert math.isnan(relative_error(torch.tensor([3.0, math.nan, -math.inf]), exact))
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0
    assert relative_error(torch.ones(2), torch.zeros(2)) == math.inf


def test_poison_empty() -> None:
    x = torch.ones(3, dtype=torch.bfloat16)
    with poison_empty():
        for poisoned in (
            torch.empty(2, 3),
            torch.empty(3, requires_grad=True),
            torch.empty_like(x),
            torch.empty_strided((2, 2), (1, 2)),
            x.new_empty(4),
        ):
            assert poisoned.isnan().all()
        assert torch.empty(3, dtype=torch.int32).shape == (3,)
    assert "new_empty" not in vars(torch.Tensor)


def test_make_qkv_is_the_same_in_every_dtype() -> None:
    exact = make_qkv(2, 3, 5, 4, 2, 8, dtype=torch.float64, seed=3, scale=2.0)
    rounded = make_qkv(2, 3, 5, 4, 2, 8, dtype=torch.bfloat16, seed=3, scale=2.0)
    for x, y in zip(exact, rounded, strict=True):
        assert torch.equal(x.bfloat16(), y)
    assert not torch.equal(exact[0], make_qkv(2, 3, 5, 4, 2, 8, dtype=torch.float64, seed=4)[0])
