"""Elementwise parts of Muon's step, compared with formulas in fp64."""

import math

import pytest
import torch

from kernels.fused.dispatch import module_of

pytest.importorskip("triton")

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
IMPLS = ["reference", "triton"]
# One element, sizes that are not multiples of the blocks, several blocks, several tiles each way.
SHAPES = [(1, 1), (3, 5), (64, 64), (7, 600), (65, 130), (130, 65)]


def random(*shape, seed=0, device="cpu"):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def matrices(n, shape, seed, device, first=0):
    """Matrices in one tensor from its element `first` on, which may break their alignment."""
    numbers = random(first + n * math.prod(shape), seed=seed, device=device)
    return list(numbers[first:].view(n, *shape).unbind())


def strided(x, layout):
    """x with other strides: those of a transposed update, or of some rows of larger matrices."""
    if layout == "transposed":
        return x.mT.contiguous().mT
    if layout == "rows":
        return torch.nn.functional.pad(x, (0, 0, 0, 3))[:, : x.shape[1]]
    return x


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("first", "divided"), [(0, False), (1, True)])
def test_momenta(shape, first, divided, impl, device):
    grads, buffers = (matrices(3, shape, seed, device, first) for seed in (0, 1))
    grads[1] = grads[1].T.contiguous().T  # autograd may return any strides
    kept = [grad.clone() for grad in grads]
    divisor = torch.tensor(1.7, device=device) if divided else None
    g = torch.stack(grads).double() / (1.7 if divided else 1.0)
    means = torch.stack(buffers).double() * 0.9 + g * 0.1
    skip = torch.tensor(0.0, device=device) if divided else None
    batch = module_of(impl, "muon").MuonUpdate().momentum(
        grads, buffers, momentum=0.9, divisor=divisor, skip=skip
    )  # fmt: skip
    torch.testing.assert_close(torch.stack(buffers).double(), means, rtol=1e-6, atol=1e-6)
    # Triton's interpreter truncates instead of rounding to the nearest bfloat16.
    assert batch.dtype == torch.bfloat16 and batch.is_contiguous()
    torch.testing.assert_close(batch.double(), g * 0.1 + means * 0.9, rtol=2**-7, atol=1e-6)
    assert all(torch.equal(x, y) for x, y in zip(grads, kept, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("shape", "layout", "first"),
    [
        *((shape, "contiguous", 0) for shape in SHAPES),
        *((shape, "transposed", 0) for shape in SHAPES),
        ((65, 130), "rows", 0),
        ((65, 130), "transposed", 1),
    ],
)
def test_updates_of_weights(shape, layout, first, impl, device):
    weights = matrices(3, shape, 0, device, first)
    weights[0][0, 0] = 0.0
    y = random(3, *shape, seed=1, device=device).bfloat16()
    y[1, 0, 0] = 0.0
    factors = random(3, shape[0], 1, seed=2, device=device).abs() + 0.5
    casts = [torch.full_like(w, 9.0, dtype=torch.float16) for w in weights]
    w, update = torch.stack(weights).double(), y.double() * factors.double()
    expected = w * (1 - 0.02 * 0.3) - 0.02 * update
    before = [weight._version for weight in weights]
    module_of(impl, "muon").MuonUpdate().apply(
        weights, [casts[0], None, casts[2]], strided(y, layout), factors,
        lr=torch.tensor(0.02, device=device), weight_decay=0.3,
        skip=torch.tensor(0.0, device=device),
    )  # fmt: skip
    torch.testing.assert_close(torch.stack(weights).double(), expected, rtol=1e-6, atol=1e-7)
    for number in (0, 2):
        assert torch.equal(casts[number], weights[number].half())
    assert (casts[1] == 9).all()
    assert all(x._version > version for x, version in zip(weights, before, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("impl", IMPLS)
def test_skipped_steps_change_nothing(impl, device):
    shape, nan = (65, 70), math.nan
    grads, buffers, weights = (matrices(2, shape, seed, device) for seed in range(3))
    grads[1][3, 4] = nan
    skip, lr = torch.tensor(1.0, device=device), torch.tensor(0.02, device=device)
    casts = [weight.half() for weight in weights]
    kept = [x.clone() for x in (*grads, *buffers, *weights, *casts)]
    update = module_of(impl, "muon").MuonUpdate()
    batch = update.momentum(grads, buffers, momentum=0.9, divisor=None, skip=skip)
    # It is defined, so that its products are.
    assert batch[0].isfinite().all() and batch[1].isfinite().sum() >= 65 * 70 - 1
    factors = torch.full((2, 65, 1), nan, device=device)
    update.apply(weights, casts, batch, factors, lr=lr, weight_decay=0.3, skip=skip)
    for x, old in zip((*grads, *buffers, *weights, *casts), kept, strict=True):
        torch.testing.assert_close(x, old, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("impl", IMPLS)
def test_shards_without_rows(impl):
    update, empty = module_of(impl, "muon").MuonUpdate(), [torch.zeros(0, 8) for _ in range(2)]
    batch = update.momentum(empty, empty, momentum=0.9, divisor=None, skip=None)
    assert batch.shape == (2, 0, 8) and batch.dtype == torch.bfloat16
    update.apply(
        empty, [None, None], batch, torch.zeros(2, 0, 1),
        lr=torch.tensor(0.1), weight_decay=0.1, skip=None,
    )  # fmt: skip


@pytest.mark.parametrize("impl", IMPLS)
def test_tensors_may_move_between_steps(impl):
    update = module_of(impl, "muon").MuonUpdate()
    for seed in range(3):
        grads, buffers = matrices(2, (3, 5), seed, "cpu"), matrices(2, (3, 5), 9, "cpu")
        expected = torch.stack(buffers).lerp(torch.stack(grads), 0.5)
        update.momentum(grads, buffers, momentum=0.5, divisor=None, skip=None)
        torch.testing.assert_close(torch.stack(buffers), expected)
