"""Attention layer: arguments passed to the kernels, and rotary embedding of q and k but not v."""

from typing import Any

import pytest
import torch

import model.attention
from kernels import flash_attention, flash_attention_packed
from model.attention import SelfAttention
from model.config import ModelConfig
from model.positions import rotary_tables

B, T, C = 2, 13, 32


def make_layer(layer: int = 0, **changes: Any) -> SelfAttention:
    torch.manual_seed(0)
    return SelfAttention(ModelConfig(n_head=4, n_embd=C, **changes), layer).double()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Record the arguments of every call from a layer to an attention function."""
    recorded = []

    def spy(qkv: Any, **options: Any) -> Any:
        recorded.append({"qkv": qkv, **options})
        return flash_attention_packed(qkv, **options)

    def spy_unpacked(q: Any, k: Any, v: Any, **options: Any) -> Any:
        recorded.append({"q": q, "k": k, "v": v, **options})
        return flash_attention(q, k, v, **options)

    monkeypatch.setattr(model.attention, "flash_attention_packed", spy)
    monkeypatch.setattr(model.attention, "flash_attention", spy_unpacked)
    return recorded


def test_qkv_is_passed_to_attention_without_a_copy(calls: list[dict[str, Any]]) -> None:
    x, tables = torch.randn(B, T, C).double(), rotary_tables(torch.arange(T), C // 4, 10_000.0)
    layer = make_layer()
    layer(x)
    layer(x, tables)
    packed, unpacked = calls
    assert packed["qkv"].shape == (B, T, 3, 4, C // 4) and packed["qkv"].is_contiguous()
    assert unpacked["v"].stride() == packed["qkv"].unbind(2)[2].stride()


@pytest.mark.parametrize(("attention", "impl"), [("auto", None), ("sdpa", "sdpa")])
def test_the_configured_implementation_is_used(
    attention: str, impl: str | None, calls: list[dict[str, Any]]
) -> None:
    make_layer(attention=attention)(torch.randn(B, T, C, dtype=torch.float64))
    assert calls[0]["impl"] == impl


@pytest.mark.parametrize(("inverse", "scale"), [(False, 8**-0.5), (True, 8**-0.5 / 4)])
def test_softmax_scale(inverse: bool, scale: float, calls: list[dict[str, Any]]) -> None:
    layer = make_layer(layer=3, scale_attn_by_inverse_layer_idx=inverse)
    layer(torch.randn(B, T, C, dtype=torch.float64))
    assert calls[0]["softmax_scale"] == pytest.approx(scale)


def test_every_call_in_training_draws_its_own_dropout_seed(calls: list[dict[str, Any]]) -> None:
    layer = make_layer(attention_dropout=0.1)
    x = torch.randn(B, T, C, dtype=torch.float64)
    layer(x)
    layer(x)
    seeds = [call["dropout_seed"] for call in calls]
    assert all(seed.shape == (1,) and seed.dtype == torch.int64 for seed in seeds)
    assert seeds[0] != seeds[1] and min(seeds) >= 0
    before = torch.get_rng_state()
    layer.eval()(x)
    assert calls[-1]["dropout_seed"] is None and calls[-1]["dropout_p"] == 0.0
    assert torch.equal(torch.get_rng_state(), before)


def test_rotary_attention_is_invariant_to_shifts() -> None:
    layer = make_layer(positions="rotary")
    x = 5 * torch.randn(B, T, C, dtype=torch.float64)
    positions = torch.arange(T)
    expected = layer(x, rotary_tables(positions, C // 4, 10_000.0)).branch
    shifted = layer(x, rotary_tables(positions + 777, C // 4, 10_000.0)).branch
    torch.testing.assert_close(shifted, expected, rtol=0, atol=1e-5)
    assert (layer(x).branch - expected).abs().max() > 1e-2
    stretched = layer(x, rotary_tables(positions * 3, C // 4, 10_000.0)).branch
    assert (stretched - expected).abs().max() > 1e-2
