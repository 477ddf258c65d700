import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kernels.fused.cast_cache import CastCache, cast_weight
from training.adamw import AdamW
from training.language.config import OptimConfig
from training.muon import Muon
from training.optim import make_optimizer
from training.step import GraphedStep

pytest.importorskip("triton")

IMPLS = pytest.mark.parametrize("impl", ["reference", "triton"])
SHAPES = [(24, 8), (8, 24), (8, 8), (24, 8), (17, 5)]


def weights(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def give_gradients(parameters: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator)


def muon(parameters: list[nn.Parameter], impl: str | None = None, **settings: Any) -> Muon:
    group = {"params": parameters, "momentum": 0.9, **settings}
    return Muon([group], lr=0.02, weight_decay=0.1, impl=impl)


@IMPLS
def test_muon_steps_match_pytorch(impl: str) -> None:
    ours, theirs = weights(), weights()
    a = muon(ours, impl)
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


@IMPLS
def test_normuon_normalises_the_rows_of_the_update(impl: str) -> None:
    ours, plain = weights(), weights()
    optimizer, other = muon(ours, impl, normalize_rows=True), muon(plain, impl)
    squares = [torch.zeros(len(p), 1) for p in ours]
    for step in range(3):
        before = [p.detach().clone() for p in ours]
        for p, q in zip(ours, plain, strict=True):
            q.data.copy_(p.data)
        give_gradients(ours, step)
        give_gradients(plain, step)
        optimizer.step()
        other.step()
        for n, (p, q, was) in enumerate(zip(ours, plain, before, strict=True)):
            update, muons = (was * (1 - 0.02 * 0.1) - x.detach() for x in (p, q))
            rows, columns = p.shape
            orthogonal = muons / (0.02 * 0.2 * max(rows, columns) ** 0.5)
            squares[n] += 0.001 * (orthogonal.square().mean(1, keepdim=True) - squares[n])
            expected = orthogonal / squares[n].sqrt()
            expected *= 0.02 * 0.2 * (rows * columns) ** 0.5 / expected.norm()
            torch.testing.assert_close(update, expected, rtol=1e-3, atol=1e-6)
            # AdamW's typical root mean square, and rows of nearly equal size
            torch.testing.assert_close(update.square().mean().sqrt(), torch.tensor(0.02 * 0.2))
    assert optimizer.state[ours[0]]["row_squares"].shape == (24, 1)


def test_settings_reach_the_optimizer() -> None:
    model = nn.ModuleDict({"blocks": nn.Linear(3, 2), "head": nn.Linear(3, 2)})
    settings = {"max_steps": 10, "batch_tokens": 64, "micro_batch_size": 1, "betas": (0.8, 0.9)}
    for name, normalize in (("muon", False), ("normuon", True)):
        chosen = {"momentum": 0.7}
        optimizer = make_optimizer(model, OptimConfig(name=name, **settings, **chosen))
        (group,) = (g for g in optimizer.param_groups if g["momentum"] is not None)
        assert group["params"] == [model["blocks"].weight]
        expected = chosen | {"normalize_rows": normalize, "betas": (0.8, 0.9)}
        assert {key: group[key] for key in expected} == expected


@IMPLS
@pytest.mark.parametrize("normalize_rows", [False, True])
def test_a_step_that_is_not_finite_is_skipped(normalize_rows: bool, impl: str) -> None:
    ours = weights()
    optimizer = muon(ours, impl, normalize_rows=normalize_rows)
    give_gradients(ours, 0)
    optimizer.step()
    before = [p.detach().clone() for p in ours]
    states = [{key: x.clone() for key, x in optimizer.state[p].items()} for p in ours]
    give_gradients(ours, 1)
    assert ours[2].grad is not None
    ours[2].grad[0, 0] = math.nan
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    for p, was, state in zip(ours, before, states, strict=True):
        assert torch.equal(p, was) and state["step"] == 1
        assert all(torch.equal(optimizer.state[p][key], x) for key, x in state.items())


@IMPLS
def test_gradients_are_divided(impl: str) -> None:
    results: list[list[Tensor]] = []
    for divisor in (1.0, 4.0):
        some = weights()
        each = muon(some, impl)
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


# Triton's interpreter truncates to bfloat16.
@pytest.mark.parametrize(
    ("impl", "dtype"), [("reference", torch.bfloat16), ("triton", torch.float16)]
)
def test_cached_casts_are_written(impl: str, dtype: torch.dtype) -> None:
    ours = weights()
    optimizer, cache = muon(ours, impl), CastCache()
    with cache.activate():
        cast = cast_weight(ours[0], dtype)
        give_gradients(ours, 0)
        optimizer.step()
    assert torch.equal(cast, ours[0].detach().to(dtype))
    with cache.activate():
        assert cast_weight(ours[0], dtype) is cast


def test_weights_that_the_kernels_do_not_support() -> None:
    """The reference updates weights of any dtype and strides; a request for the kernels fails."""
    transposed = nn.Parameter(torch.randn(4, 3).T)
    half = nn.Parameter(torch.randn(3, 4).bfloat16())
    for weight, reason in ((transposed, r"strides \(1, 3\)"), (half, r"is torch\.bfloat16")):
        before = weight.detach().clone()
        weight.grad = torch.ones_like(weight)
        with pytest.raises(ValueError, match=f"impl='triton' cannot serve this call: .*{reason}"):
            muon([weight], "triton").step()
        for some in (False, True):
            muon([weight], normalize_rows=some).step()
        # Each update has a root mean square of about 0.2 * lr = 0.004; decay is much smaller.
        change = (weight - before).float().square().mean().sqrt()
        assert 0.004 < change < 0.012 and weight.dtype == before.dtype


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("settings", [{}, {"normalize_rows": True}])
def test_graphed_steps(settings: dict[str, Any], device: str) -> None:
    """Replays read the address tables of their capture, also after steps on other addresses."""
    n_steps = 24 if device == "cuda" else 9  # nothing is captured on CPUs
    results: list[list[Tensor]] = []
    for impl in ("triton", "reference"):
        ours = [nn.Parameter(w.detach().to(device)) for w in weights()]
        slopes = [w.detach().to(device) for w in weights(seed=1)]
        group = {"params": ours, "momentum": 0.9, **settings}
        lr, n_wrong = torch.tensor(0.02, device=device), torch.zeros((), device=device)
        optimizer = Muon([group], lr=lr, weight_decay=0.1, impl=impl, capturable=device == "cuda")

        def step(
            factor: Tensor,
            ours: list[nn.Parameter] = ours,
            slopes: list[Tensor] = slopes,
            optimizer: Muon = optimizer,
            n_wrong: Tensor = n_wrong,
        ) -> None:
            optimizer.zero_grad(set_to_none=True)
            casts = [cast_weight(w, torch.float16) for w in ours]
            sums = [(w * slope).sum() for w, slope in zip(ours, slopes, strict=True)]
            (torch.stack(sums).sum() * factor).backward()
            optimizer.found_inf = (factor % 5 == 0).float()
            optimizer.step()
            for w, cast in zip(ours, casts, strict=True):
                n_wrong.add_((cast != w.half()).sum())

        takes = [GraphedStep(step, optimizer, torch.device(device)) for _ in range(2)]
        for number, factor in enumerate(torch.arange(1.0, n_steps + 1, device=device)):
            takes[number // 8 % 2](factor)
            for size in (2, 4, 8):  # overwrites old address tables if their memory was freed
                torch.full((size,), -1, device=device)
                if device == "cuda":
                    torch.full((size,), -1).pin_memory()
        taken = n_steps - n_steps // 5
        assert n_wrong == 0 and all(state["step"] == taken for state in optimizer.state.values())
        results.append([w.detach() for w in ours])
    for x, y, start in zip(*results, weights(), strict=True):
        change = (y.cpu() - start).norm()
        # Both round to bfloat16 internally, and Triton's interpreter truncates.
        assert (x - y).norm() < 0.05 * change


def test_muon_refuses_vectors_and_closures() -> None:
    with pytest.raises(ValueError, match=r"a parameter has shape \(3,\)"):
        muon([nn.Parameter(torch.zeros(3))])
    with pytest.raises(ValueError, match="does not support a closure"):
        muon(weights()).step(lambda: 0.0)
