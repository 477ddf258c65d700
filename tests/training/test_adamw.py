"""AdamW kernel, compared with PyTorch's fused AdamW and with AdamW in fp64."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from kernels import triton
from kernels.fused.cast_cache import CastCache, cast_weight
from training.adamw import AdamW, _unsupported_reason
from training.step import GraphedStep

pytest.importorskip("triton")

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ODD = ((7,), (3, 5), (1,), (), (4100,), (33, 130))
EVEN = ((8,), (4, 1024), (4100,))


def weights(shapes, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=generator).to(device)) for s in shapes]


def make(kind, shapes, device="cpu", betas=(0.9, 0.95), **options):
    """Weights and an optimizer with two groups, one of them with weight decay."""
    made = weights(shapes, device)
    groups = [{"params": made[1:], "weight_decay": 0.1}, {"params": made[:1], "weight_decay": 0.0}]
    return made, kind(groups, lr=1e-2, betas=betas, eps=1e-8, **options)


def give_gradients(all_weights, seed):
    """Give the same gradients to each list of weights."""
    generator = torch.Generator().manual_seed(seed)
    for same in zip(*all_weights, strict=True):
        gradient = torch.randn(same[0].shape, generator=generator)
        for weight in same:
            weight.grad = gradient.to(weight, copy=True)


def assert_equal_steps(optimizers, all_weights):
    """Assert equal weights, moments and step counts of two optimizers, up to rounding."""
    for mine, other in zip(*all_weights, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)
        states = [o.state[w] for o, w in zip(optimizers, (mine, other), strict=True)]
        assert states[0].keys() == states[1].keys()
        for name, value in states[0].items():
            torch.testing.assert_close(value, states[1][name], rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shapes", [ODD, EVEN])
@pytest.mark.parametrize("lr_on_device", [False, True])
def test_steps_match_pytorch(shapes, lr_on_device, device):
    mine, optimizer = make(AdamW, shapes, device, impl="triton", capturable=lr_on_device)
    theirs, other = make(torch.optim.AdamW, shapes, device, fused=True, capturable=lr_on_device)
    for step in range(5):
        give_gradients((mine, theirs), step)
        kept = [w.grad.clone() for w in mine]
        for o in (optimizer, other):
            for group in o.param_groups:
                lr = 1e-2 * (step + 1)
                group["lr"] = torch.tensor(lr, device=device) if lr_on_device else lr
            o.grad_scale = torch.tensor(1.5, device=device)
            o.found_inf = torch.tensor(float(step == 2), device=device)
            o.step()
        assert all(torch.equal(w.grad, g) for w, g in zip(mine, kept, strict=True))
    assert_equal_steps((optimizer, other), (mine, theirs))


def test_early_steps_are_accurate():
    """Where 1 - beta^step is small, steps match fp64."""
    betas = 0.999, 0.99999
    (mine,), optimizer = make(AdamW, [(5,)], betas=betas, impl="triton")
    exact = nn.Parameter(mine.detach().double())
    other = torch.optim.AdamW([exact], lr=1e-2, betas=betas, eps=1e-8, weight_decay=0.0)
    for step in range(3):
        give_gradients(([mine],), step)
        exact.grad = mine.grad.double()
        optimizer.step()
        other.step()
    torch.testing.assert_close(mine.double(), exact, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shapes", [ODD, EVEN])
def test_cached_casts_are_written(shapes, device):
    mine, optimizer = make(AdamW, shapes, device, impl="triton")
    cache = CastCache()
    with cache.activate():
        casts = [cast_weight(weight, torch.float16) for weight in mine[::2]]
        for step in range(3):
            give_gradients([mine], step)
            optimizer.found_inf = torch.tensor(float(step == 1), device=device)
            before = [weight._version for weight in mine]
            optimizer.step()
            assert all(w._version > b for w, b in zip(mine, before, strict=True))
            for weight, cast in zip(mine[::2], casts, strict=True):
                assert torch.equal(cast, weight.half())
                assert cast_weight(weight, torch.float16) is cast
    assert all(cache.find(weight) is None for weight in mine[1::2])


def test_zero_beta1_and_missing_gradients():
    mine, optimizer = make(AdamW, ODD, betas=(0.0, 0.9), impl="triton")
    theirs, other = make(torch.optim.AdamW, ODD, betas=(0.0, 0.9), fused=True)
    for step in range(3):
        give_gradients((mine, theirs), step)
        for some in (mine, theirs):  # different weights in each step, and once a whole group
            for number in ((1,), (0,), (2, 5))[step]:
                some[number].grad = None
        optimizer.step()
        other.step()
    assert_equal_steps((optimizer, other), (mine, theirs))


def test_state_dicts_are_interchangeable_with_pytorch():
    mine, optimizer = make(AdamW, ODD, impl="triton")
    theirs, other = make(torch.optim.AdamW, ODD, fused=True)
    give_gradients((mine, theirs), 0)
    optimizer.step()
    other.step()
    saved = optimizer.state_dict(), other.state_dict()
    optimizer.load_state_dict(saved[1])
    other.load_state_dict(saved[0])
    give_gradients((mine, theirs), 1)
    optimizer.step()
    other.step()
    assert_equal_steps((optimizer, other), (mine, theirs))


@pytest.mark.parametrize("first", [0, 1, 4])
def test_gradients_may_share_one_bucket(first):
    """DistributedDataParallel does this; a gradient may start at any offset of the bucket."""
    mine, optimizer = make(AdamW, EVEN, impl="triton")
    theirs, other = make(torch.optim.AdamW, EVEN, fused=True)
    give_gradients((mine, theirs), 0)
    bucket = torch.zeros(first + sum(w.numel() for w in mine))
    for weight in mine:
        place = bucket[first : first + weight.numel()].view_as(weight)
        weight.grad = place.copy_(weight.grad)
        first += weight.numel()
    optimizer.step()
    other.step()
    assert_equal_steps((optimizer, other), (mine, theirs))


def test_the_default_on_a_cpu_is_pytorch():
    mine, optimizer = make(AdamW, ODD)
    theirs, other = make(torch.optim.AdamW, ODD, fused=True)
    give_gradients((mine, theirs), 0)
    optimizer.step()
    other.step()
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_unsupported_weights_are_refused():
    weight = nn.Parameter(torch.randn(4, 3).T)
    weight.grad = torch.ones_like(weight)
    with pytest.raises(
        ValueError, match=r"impl='triton' cannot serve this call: .*strides \(1, 3\)"
    ):
        AdamW([weight], impl="triton").step()
    half = nn.Parameter(torch.randn(3, dtype=torch.bfloat16))
    half.grad = torch.ones_like(half)
    with pytest.raises(ValueError, match=r"float32 and on one device, and one is torch\.bfloat16"):
        AdamW([half], impl="triton").step()


def test_interpreted_kernels_do_not_support_gpu_weights(monkeypatch):
    monkeypatch.setattr(triton, "_INTERPRETED", True)
    on_gpu = SimpleNamespace(is_cuda=True, dtype=torch.float32, device=torch.device("cuda"))
    assert "TRITON_INTERPRET=1 runs kernels on the CPU" in (
        _unsupported_reason([(on_gpu, on_gpu)]) or ""
    )


@pytest.mark.gpu
def test_the_learning_rate_may_be_a_cpu_tensor():
    """PyTorch uses one while it initializes optimizer state before loading a state dict."""
    mine, optimizer = make(AdamW, ODD, "cuda", impl="triton", capturable=True)
    theirs, other = make(AdamW, ODD, "cuda", impl="triton")
    give_gradients((mine, theirs), 0)
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(1e-2)
    optimizer.step()
    other.step()
    assert_equal_steps((optimizer, other), (mine, theirs))


@pytest.mark.gpu
@pytest.mark.parametrize("shapes", [ODD, EVEN])
def test_captured_steps(shapes):
    """Gradients of a captured step have other addresses than those of earlier steps."""
    made = [
        make(AdamW, shapes, "cuda", impl=impl, capturable=True) for impl in ("triton", "reference")
    ]
    factors = torch.arange(1, 9, device="cuda").float()
    for mine, optimizer in made:

        def step(factor, mine=mine, optimizer=optimizer):
            optimizer.zero_grad(set_to_none=True)
            sum((w * w).sum() for w in mine).mul(factor).backward()
            optimizer.step()

        take = GraphedStep(step, optimizer, torch.device("cuda"))
        for factor in factors:
            take(factor)
            for size in (32, 64):  # overwrites the old address tables if their memory was freed
                torch.full((size,), -1).pin_memory()
    torch.cuda.synchronize()
    assert_equal_steps([o for _, o in made], [w for w, _ in made])
