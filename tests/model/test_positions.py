"""Rotary embedding: scores depend only on distance, and norms do not change."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.fused.reference.rotary import apply_rotary
from model.positions import gather_rows, rotary_tables

BASE = 10_000.0
head_dims = st.integers(1, 64).map(lambda half: 2 * half)
offsets = st.integers(0, 5000)


def rotate(x: torch.Tensor, position: int, base: float = BASE) -> torch.Tensor:
    """Rotate one vector (D,) to `position`."""
    cos, sin = rotary_tables(torch.tensor([position]), x.shape[-1], base)
    return apply_rotary(x.view(1, 1, 1, -1), cos, sin).view(-1)


def random_vectors(head_dim: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, head_dim, generator=generator, dtype=torch.float64)
    return q, k


@settings(deadline=None, max_examples=60)
@given(head_dims, offsets, offsets, offsets, st.integers(0, 2**31))
def test_scores_depend_only_on_distance(
    head_dim: int, query: int, key: int, shift: int, seed: int
) -> None:
    q, k = random_vectors(head_dim, seed)
    original = rotate(q, query) @ rotate(k, key)
    shifted = rotate(q, query + shift) @ rotate(k, key + shift)
    # the tables hold float32, so cosines are off by up to 6e-8 each
    assert torch.allclose(original, shifted, rtol=0, atol=1e-6 * float(q.norm() * k.norm()))


@settings(deadline=None, max_examples=60)
@given(head_dims, offsets, st.integers(0, 2**31))
def test_rotation_preserves_norms(head_dim: int, position: int, seed: int) -> None:
    q, _ = random_vectors(head_dim, seed)
    torch.testing.assert_close(rotate(q, position).norm(), q.norm(), rtol=1e-6, atol=0)


@settings(deadline=None, max_examples=30)
@given(head_dims, st.integers(0, 2**31))
def test_position_zero_changes_nothing(head_dim: int, seed: int) -> None:
    q, _ = random_vectors(head_dim, seed)
    assert torch.equal(rotate(q, 0), q)


def test_pairs_of_halves_rotate_like_complex_numbers() -> None:
    T, D = 6, 8
    x = torch.randn(1, T, 1, D, dtype=torch.float64)
    cos, sin = rotary_tables(torch.arange(T), D, BASE)
    rotated = apply_rotary(x, cos, sin)
    for t in range(T):
        for i in range(D // 2):
            angle = t * BASE ** (-2 * i / D)
            pair = complex(x[0, t, 0, i], x[0, t, 0, i + D // 2])
            expected = pair * complex(math.cos(angle), math.sin(angle))
            got = complex(rotated[0, t, 0, i], rotated[0, t, 0, i + D // 2])
            assert got == pytest.approx(expected, abs=1e-6)


def test_heads_and_batch_rotate_alike_with_any_strides() -> None:
    B, T, H, D = 2, 5, 3, 8
    one = torch.randn(T, D)
    x = one[None, :, None].expand(B, T, H, D)
    rotated = apply_rotary(x, *rotary_tables(torch.arange(T), D, BASE))
    assert rotated.shape == x.shape
    assert all(torch.equal(rotated[b, :, h], rotated[0, :, 0]) for b in range(B) for h in range(H))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_tables_are_float32_and_x_keeps_its_dtype(dtype: torch.dtype) -> None:
    cos, sin = rotary_tables(torch.arange(4), 16, BASE)
    assert cos.dtype == sin.dtype == torch.float32
    assert cos.shape == sin.shape == (4, 8)
    assert apply_rotary(torch.ones(1, 4, 2, 16, dtype=dtype), cos, sin).dtype == dtype


def test_far_positions_are_as_accurate_as_near_ones() -> None:
    position = 1_000_003
    cos, sin = rotary_tables(torch.tensor([position]), 64, BASE)
    for i in range(32):
        angle = position * BASE ** (-i / 32)
        assert cos[0, i].item() == pytest.approx(math.cos(angle), abs=1e-6)
        assert sin[0, i].item() == pytest.approx(math.sin(angle), abs=1e-6)


@given(
    st.integers(1, 5), st.integers(1, 9), st.integers(0, 6), st.integers(1, 4),
    st.sampled_from([torch.int32, torch.int64]), st.integers(0, 2**31),
)  # fmt: skip
@settings(deadline=None, max_examples=60)
def test_gathered_rows_have_the_gradient_of_a_lookup(
    B: int, T: int, empty: int, C: int, dtype: torch.dtype, seed: int
) -> None:
    """Compare rows at a random subset of positions, in random order per row, then padding."""
    generator = torch.Generator().manual_seed(seed)
    N = T + empty
    table = torch.randn(N, C, generator=generator, dtype=torch.float64, requires_grad=True)
    positions = torch.stack([torch.randperm(N, generator=generator)[:T] for _ in range(B)])
    lengths = torch.randint(1, T + 1, (B, 1), generator=generator)
    padding = torch.arange(T) >= lengths
    positions = positions.masked_fill(padding, N - 1).to(dtype)
    weights = torch.randn(B, T, C, generator=generator, dtype=torch.float64)
    weights = weights.masked_fill(padding[..., None], 0)
    gradients = []
    for rows in (gather_rows(table, positions), table[positions]):
        assert torch.equal(rows, table[positions])
        gradients.append(torch.autograd.grad((rows * weights).sum(), table)[0])
    torch.testing.assert_close(gradients[0], gradients[1])
