"""Autocast: the dtype of activations, and how often weights are cast to it."""

import torch
from torch import nn

from kernels.fused.cast_cache import CastCache, active_cast_cache
from kernels.fused.linear import linear
from training.numerics import autocast

CPU = torch.device("cpu")


def test_a_weight_is_cast_once_per_context():
    weight, x = nn.Parameter(torch.randn(3, 5)), torch.randn(2, 5)
    with autocast("bfloat16", CPU):
        cache = active_cast_cache()
        assert cache is not None
        assert linear(x, weight).dtype == torch.bfloat16
        first = cache.find(weight)
        linear(x, weight).sum().backward()
        assert cache.find(weight) is first is not None
    assert active_cast_cache() is None


def test_an_outer_cache_serves_all_passes_of_a_step():
    weight = nn.Parameter(torch.randn(3, 5))
    with (cache := CastCache()).activate():
        for _ in range(2):
            with autocast("bfloat16", CPU):
                linear(torch.randn(2, 5), weight)
                assert active_cast_cache() is cache
        assert cache.find(weight) is not None


def test_in_float32_nothing_is_cast():
    weight = nn.Parameter(torch.randn(3, 5))
    with autocast("float32", CPU):
        assert linear(torch.randn(2, 5), weight).dtype == torch.float32
        assert active_cast_cache() is None
