import math

import pytest
import torch
from torch import Tensor, nn

from kernels.fused.cast_cache import CastCache, cast_weight
from training.adamw import AdamW
from training.muon import Muon, orthogonalize

SHAPES = [(24, 8), (8, 24), (8, 8), (24, 8), (17, 5)]


def weights(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def give_gradients(parameters: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator)


def muon(parameters: list[nn.Parameter], **settings: float) -> Muon:
    settings = {"lr": 0.02, "weight_decay": 0.1} | settings
    return Muon([{"params": parameters, "momentum": 0.9}], **settings)


def test_muon_steps_match_pytorch() -> None:
    ours, theirs = weights(), weights()
    a = muon(ours)
    b = torch.optim.Muon(
        theirs, lr=0.02, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(4):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        a.step()
        b.step()
        for x, y in zip(ours, theirs, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=2e-3)  # both round to bfloat16 internally
            buffers = a.state[x]["momentum_buffer"], b.state[y]["momentum_buffer"]
            torch.testing.assert_close(*buffers)
    assert not torch.allclose(ours[0], weights()[0], atol=1e-2)


@pytest.mark.parametrize("shape", [(3, 16, 40), (2, 40, 16), (1, 9, 9)])
def test_singular_values_end_near_one(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    y = orthogonalize(x).float()
    values = torch.linalg.svdvals(y)
    assert values.min() > 0.6 and values.max() < 1.3
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    near = u @ v
    assert ((y - near).norm() / near.norm()) < 0.35
    assert orthogonalize(torch.zeros(1, 4, 4)).abs().max() == 0


def test_a_step_that_is_not_finite_is_skipped_and_gradients_are_divided() -> None:
    ours = weights()
    optimizer = muon(ours)
    give_gradients(ours, 0)
    optimizer.step()
    before = [p.detach().clone() for p in ours]
    buffers = [optimizer.state[p]["momentum_buffer"].clone() for p in ours]
    give_gradients(ours, 1)
    assert ours[2].grad is not None
    ours[2].grad[0, 0] = math.nan
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    for p, was, buffer in zip(ours, before, buffers, strict=True):
        assert torch.equal(p, was) and optimizer.state[p]["step"] == 1
        assert torch.equal(optimizer.state[p]["momentum_buffer"], buffer)

    results: list[list[Tensor]] = []
    for divisor in (1.0, 4.0):
        some = weights()
        each = muon(some)
        give_gradients(some, 0)
        for p in some:
            assert p.grad is not None
            p.grad *= divisor
        each.grad_scale, each.found_inf = torch.tensor(divisor), torch.zeros(())
        each.step()
        results.append([p.detach() for p in some])
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)


def test_other_groups_use_adamw() -> None:
    def groups(parameters: list[nn.Parameter]) -> list[dict]:
        return [{"params": parameters[:2], "weight_decay": 0.1}, {"params": parameters[2:4]}]

    ours, theirs = weights(), weights()
    a = Muon([*groups(ours), {"params": ours[4:], "momentum": 0.9}], lr=0.02)
    b = AdamW(groups(theirs), lr=0.02)
    for step in range(3):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        a.step()
        b.step()
    for x, y in zip(ours[:4], theirs[:4], strict=True):
        assert torch.equal(x, y)
    assert not torch.equal(ours[4], theirs[4])
    assert a.state[ours[4]].keys() == {"step", "momentum_buffer"}


def test_cached_casts_are_written() -> None:
    ours = weights()
    optimizer, cache = muon(ours), CastCache()
    with cache.activate():
        cast = cast_weight(ours[0], torch.bfloat16)
        give_gradients(ours, 0)
        optimizer.step()
    assert torch.equal(cast, ours[0].detach().bfloat16())
    with cache.activate():
        assert cast_weight(ours[0], torch.bfloat16) is cast


def test_muon_refuses_vectors_and_closures() -> None:
    with pytest.raises(ValueError, match=r"a parameter has shape \(3,\)"):
        muon([nn.Parameter(torch.zeros(3))])
    with pytest.raises(ValueError, match="does not support a closure"):
        muon(weights()).step(lambda: 0.0)
