"""The dtype of activations, and how often weights are cast for it."""

import torch
from torch import nn

from kernels.fused.cast_cache import KeptCasts, kept_casts
from kernels.fused.linear import linear
from training.numerics import autocast

CPU = torch.device("cpu")


def test_a_weight_is_cast_once_in_all_passes_of_a_context():
    weight, x = nn.Parameter(torch.randn(3, 5)), torch.randn(2, 5)
    with autocast("bfloat16", CPU):
        casts = kept_casts()
        assert casts is not None
        assert linear(x, weight).dtype == torch.bfloat16
        first = casts.find(weight)
        linear(x, weight).sum().backward()
        assert casts.find(weight) is first is not None
    assert kept_casts() is None


def test_casts_of_a_step_serve_its_passes():
    weight = nn.Parameter(torch.randn(3, 5))
    with (casts := KeptCasts()).on():
        for _ in range(2):
            with autocast("bfloat16", CPU):
                linear(torch.randn(2, 5), weight)
                assert kept_casts() is casts
        assert casts.find(weight) is not None


def test_in_float32_nothing_is_cast():
    weight = nn.Parameter(torch.randn(3, 5))
    with autocast("float32", CPU):
        assert linear(torch.randn(2, 5), weight).dtype == torch.float32
        assert kept_casts() is None
