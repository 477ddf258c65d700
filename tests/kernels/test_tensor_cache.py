"""Results are computed once for each tensor, and again after it was written to."""

import gc

import torch

from kernels.tensor_cache import TensorCache


def test_a_result_is_computed_once_for_each_version():
    cache, calls = TensorCache(), []

    def total(x, factor):
        calls.append(factor)
        return x.sum().item() * factor

    x = torch.ones(3)
    assert [cache.get(x, total, 2) for _ in range(2)] == [6, 6]
    assert calls == [2]
    assert cache.get(x, total, 5) == 15
    x[0] = 4
    assert cache.get(x, total, 5) == 30
    assert cache.get(x.clone(), total, 5) == 30
    assert calls == [2, 5, 5, 5]


def test_inference_mode_is_not_cached():
    cache, calls = TensorCache(), []
    with torch.inference_mode():
        x = torch.ones(3)
        for _ in range(2):
            cache.get(x, calls.append)
    assert len(calls) == 2


def test_a_result_lives_as_long_as_its_tensor():
    cache = TensorCache()
    x = torch.ones(3)
    cache.get(x, torch.clone)
    assert len(cache._results) == 1
    del x
    gc.collect()
    assert len(cache._results) == 0
