"""FLOP formulas compared with PyTorch's counter, and the table of GPUs."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from model.config import GPT2_SIZES, ModelConfig
from model.flops import (
    count_params,
    forward_flops_per_token,
    mfu,
    peak_flops,
    train_flops_per_token,
)
from model.gpt import GPT

A100 = "NVIDIA A100-SXM4-80GB"


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize("size", GPT2_SIZES)
def test_count_params_agrees_with_the_model(size: str, positions: str, bias: bool) -> None:
    config = ModelConfig(**GPT2_SIZES[size], positions=positions, bias=bias)
    with torch.device("meta"):
        assert count_params(config) == GPT(config).n_params(lookup_tables=False)


@pytest.mark.parametrize("change", [{}, {"head_size": 24, "n_inner": 50, "tie_embeddings": False}])
def test_formulas_agree_with_the_flop_counter(change: dict) -> None:
    B, T = 2, 24
    sizes = {"vocab_size": 128, "context_length": T, "n_layer": 2, "n_head": 2, "n_embd": 32}
    config = ModelConfig(**sizes, **change, attention="reference")
    model = GPT(config)
    tokens, targets = torch.randint(128, (2, B, T))
    # the reference multiplies every query with every key, as the full (not causal) formula counts
    vectors = sum(p.numel() for p in model.parameters() if p.dim() == 1)  # vectors need no matmul
    matmul = forward_flops_per_token(config, causal=False) - 2 * vectors
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        model(tokens, targets)
    assert forward.get_total_flops() == matmul * B * T
    with FlopCounterMode(display=False) as both:  # the head's forward pass
        model(tokens, targets).backward()
    assert both.get_total_flops() == 3 * matmul * B * T


def test_causal_halves_only_attention() -> None:
    config = ModelConfig()
    N, attention = count_params(config), 12 * 12 * 768 * 1024
    assert N == 124_439_808 - 1024 * 768
    assert train_flops_per_token(config, causal=False) == 6 * N + attention
    assert train_flops_per_token(config, causal=True) == 6 * N + attention / 2
    assert forward_flops_per_token(config, causal=False) == 2 * N + attention / 3
    longer = ModelConfig(context_length=4096)
    assert train_flops_per_token(longer, causal=False) == 6 * N + 4 * attention


@pytest.mark.parametrize(
    ("device_name", "tflops"),
    [
        (A100, 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA A10", 125),
        ("NVIDIA A10G", 70),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA GeForce RTX 3090", 71),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA L40", None),
        ("Tesla V100-SXM2-16GB", None),
        ("", None),
    ],
)
def test_peak_flops(device_name: str, tflops: int | None) -> None:
    assert peak_flops(device_name) == (None if tflops is None else tflops * 1e12)


def test_mfu_gives_both_conventions() -> None:
    config = ModelConfig()
    # the paper's released code trains GPT-2 small at 1.42M tokens/s on 8 A100: about half of peak
    result = mfu(1.42e6 / 8, config, A100)
    assert result is not None
    assert result.full == pytest.approx(0.486, abs=0.002)
    assert result.causal == pytest.approx(0.454, abs=0.002)
    assert mfu(1e5, config, "Some GPU") is None
