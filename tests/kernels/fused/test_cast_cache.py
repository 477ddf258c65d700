"""Cast cache: how often weights are cast, and that no cast is outdated."""

import pytest
import torch
from torch import nn

from kernels.fused import cast_cache
from kernels.fused.cast_cache import CastCache, cast_weight
from kernels.fused.cross_entropy import linear_cross_entropy
from kernels.fused.gelu_mlp import gelu_mlp

HALF = torch.float16


@pytest.fixture
def weight():
    return nn.Parameter(torch.randn(5, 3))


@pytest.fixture
def n_made(monkeypatch):
    """Function that counts the casts made or refreshed so far."""
    made = []
    cast, refresh = cast_cache._cast, cast_cache._Entry.refresh
    monkeypatch.setattr(cast_cache, "_cast", lambda *args: made.append(1) or cast(*args))
    monkeypatch.setattr(cast_cache._Entry, "refresh", lambda x: made.append(1) or refresh(x))
    return lambda: len(made)


def test_without_a_cache_each_use_has_its_own_cast(weight):
    first, second = cast_weight(weight, HALF), cast_weight(weight, HALF)
    assert first is not second and torch.equal(first, weight.half())
    assert cast_weight(weight, torch.float32).data_ptr() == weight.data_ptr()
    assert cast_weight(weight.T, HALF).is_contiguous()


def test_each_step_casts_once_into_the_same_memory(weight, n_made):
    cache = CastCache()
    addresses = set()
    for step in (1, 2):
        with cache.activate():
            for _ in range(3):
                cast = cast_weight(weight, HALF)
                assert torch.equal(cast, weight.half())
                addresses.add(cast.data_ptr())
        assert n_made() == step
        weight.data.mul_(2.0)
    assert len(addresses) == 1


def test_within_a_step_a_changed_weight_is_cast_again(weight):
    with CastCache().activate():
        cast_weight(weight, HALF)
        with torch.no_grad():
            weight.add_(1.0)
        assert torch.equal(cast_weight(weight, HALF), weight.half())
        assert cast_weight(weight, torch.bfloat16).dtype == torch.bfloat16


def test_casts_written_by_an_optimizer_are_not_made_again(weight, n_made):
    cache = CastCache()
    for _ in range(3):
        with cache.activate():
            assert torch.equal(cast_weight(weight, HALF), weight.half())
            with torch.no_grad():
                weight.add_(1.0)
                cache.find(weight).add_(1.0)
                cache.find(weight).copy_(weight)
            cache.mark_written([weight])
    assert n_made() == 1


def test_weights_changed_elsewhere_are_refreshed_before_a_step(weight):
    cache = CastCache()
    with cache.activate():
        cast = cast_weight(weight, HALF)
        cache.mark_written([weight])
    with torch.no_grad():
        weight.copy_(torch.randn(5, 3))
    assert not torch.equal(cast, weight.half())
    with cache.activate():  # a captured step reads the cast without a call
        assert torch.equal(cast, weight.half())


def test_only_parameters_are_cached(weight):
    cache = CastCache()
    with cache.activate():
        cast_weight(weight * 2.0, HALF)
        cast_weight(weight.detach(), HALF)
        assert not cache._entries
        cast_weight(weight, HALF)
        assert cache.find(weight) is cast_weight(weight.detach(), HALF)
    assert cast_cache.active_cast_cache() is None


@pytest.mark.parametrize("compiled", [False, True])
def test_both_passes_of_all_micro_batches_share_casts(compiled, n_made):
    torch.compiler.reset()
    mlp = [nn.Parameter(torch.randn(shape)) for shape in ((16, 8), (16,), (8, 16))]
    head = nn.Parameter(torch.randn(11, 8))
    targets = torch.arange(6)

    def loss_of(x):
        return linear_cross_entropy(gelu_mlp(x, *mlp), head, targets)

    run = torch.compile(loss_of, backend="aot_eager", fullgraph=True) if compiled else loss_of
    batches = torch.randn(3, 6, 8).half()
    expected = []
    for batch in batches:
        expected += torch.autograd.grad(run(batch), [*mlp, head])
    before = n_made()
    actual = []
    with CastCache().activate():
        for batch in batches:
            actual += torch.autograd.grad(run(batch), [*mlp, head])
    assert n_made() - before == 3 < before
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
