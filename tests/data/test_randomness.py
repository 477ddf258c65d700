"""Numbers that look like chance, and are the same wherever they are asked for."""

import numpy as np
import pytest
import torch

from data.randomness import fixed_chance, mix, mix_tensor


def test_integers_of_all_kinds_are_mixed_alike() -> None:
    from numba import njit

    numbers = np.array([0, 1, 2**63 - 1, 2**63, 2**64 - 1], np.uint64)
    expected = mix(numbers)
    # the first word of splitmix64 from seed 0, as its authors' code prints it
    assert mix(np.array([0x9E3779B97F4A7C15], np.uint64)) == 0xE220A8397B1DCDAF
    compiled = njit(mix)
    assert [compiled(x) for x in numbers] == expected.tolist()
    assert mix_tensor(torch.from_numpy(numbers.view(np.int64))).numpy().view(
        np.uint64
    ).tolist() == (expected.tolist())


def test_numbers_are_uniform_and_of_their_key_alone() -> None:
    chances = fixed_chance(torch.arange(500), 400)
    assert chances.dtype == torch.float32 and chances.shape == (500, 400)
    assert chances.min() >= 0 and chances.max() < 1
    counts = torch.histc(chances, bins=20, min=0, max=1)
    assert ((counts - 10_000).abs() < 5 * 10_000**0.5).all()
    keys = torch.tensor([7, 499, 7])
    assert torch.equal(fixed_chance(keys, 400), chances[keys])
    assert torch.equal(fixed_chance(keys, 9), chances[keys, :9])
    # rows and columns tell nothing of each other
    for one, other in ((chances[1:], chances[:-1]), (chances[:, 1:], chances[:, :-1])):
        correlation = torch.corrcoef(torch.stack((one.flatten(), other.flatten())))[0, 1]
        assert abs(correlation) < 5 / one.numel() ** 0.5


@pytest.mark.gpu
def test_a_gpu_draws_the_same() -> None:
    keys = torch.tensor([0, 3, 10**6, 2**40])
    assert torch.equal(fixed_chance(keys.cuda(), 5000).cpu(), fixed_chance(keys, 5000))
