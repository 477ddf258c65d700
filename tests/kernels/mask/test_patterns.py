"""Block layouts against their definitions, block by block."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels import BlockSparseMask, flash_attention
from kernels.mask.patterns import (
    butterfly,
    global_blocks,
    per_head,
    random,
    sliding_window,
    streaming,
    strided,
)
from kernels.testing import make_qkv

SIZES = (1, 2, 3, 7, 8, 13, 32)


def layout_where(n: int, sees: Callable[[int, int], bool]) -> Tensor:
    return torch.tensor([[sees(i, j) for j in range(n)] for i in range(n)])


@pytest.mark.parametrize("n", SIZES)
def test_butterfly_matches_its_definition(n: int) -> None:
    most_factors = math.ceil(math.log2(n))
    for n_factors in (None, *range(most_factors + 1)):
        powers = [2**k for k in range(most_factors if n_factors is None else n_factors)]
        for n_global in {0, min(2, n), n}:
            expected = layout_where(
                n,
                lambda i, j, powers=powers, n_global=n_global: (
                    i == j or i ^ j in powers or i < n_global or j < n_global
                ),
            )
            layout = butterfly(n, n_factors=n_factors, global_blocks=n_global)
            assert torch.equal(layout, expected), (n_factors, n_global)


def test_butterfly_counts_of_powers_of_two() -> None:
    for n_factors in range(6):
        layout = butterfly(32, n_factors=n_factors)
        assert (layout.sum(0) == 1 + n_factors).all()
        assert torch.equal(layout, layout.T)
    # partners below the diagonal have one bit fewer
    causal_rows = butterfly(32).tril().sum(1)
    assert causal_rows.tolist() == [1 + i.bit_count() for i in range(32)]


@pytest.mark.parametrize("n", SIZES)
def test_butterfly_reaches_every_block_in_n_factors_layers(n: int) -> None:
    paths = butterfly(n).double()
    n_factors = math.ceil(math.log2(n))
    assert (torch.linalg.matrix_power(paths, max(1, n_factors)) > 0).all()
    if n_factors > 1:
        assert not (torch.linalg.matrix_power(paths, n_factors - 1) > 0).all()


def test_butterfly_is_the_sum_of_the_factors_of_fly() -> None:
    # factor k of size n is block diagonal, of blocks [[D, D], [D, D]] with D diagonal, 2^k wide
    n = 16
    for n_factors in range(1, 5):
        total = torch.zeros(n, n)
        for k in range(n_factors):
            pair = torch.ones(2, 2).kron(torch.eye(2**k))
            total += torch.eye(n // 2 ** (k + 1)).kron(pair)
        assert torch.equal(butterfly(n, n_factors=n_factors), total > 0)


@pytest.mark.parametrize("n", SIZES)
def test_windows_globals_and_strides(n: int) -> None:
    for size in (1, 2, 3, n, n + 5):
        window = layout_where(n, lambda i, j, size=size: abs(i - j) < size)
        assert torch.equal(sliding_window(n, size), window)
        every = layout_where(n, lambda i, j, size=size: i == j or (i - j) % size == 0)
        assert torch.equal(strided(n, size), every)
    for count in {0, 1, n}:
        expected = layout_where(n, lambda i, j, count=count: i < count or j < count)
        assert torch.equal(global_blocks(n, count), expected)


@pytest.mark.parametrize("n", SIZES)
def test_streaming_keeps_sinks_and_local_blocks(n: int) -> None:
    for sinks in {0, min(2, n), n}:
        for local in {1, 3, n + 1}:
            expected = layout_where(
                n, lambda i, j, s=sinks, w=local: j <= i and (j < s or i - j < w)
            )
            assert torch.equal(streaming(n, sinks, local), expected)


def test_per_head_mixes_layouts_in_one_call() -> None:
    layouts = {"streaming": streaming(6, 1, 2), "sparse": butterfly(6)}
    names = ["sparse", "dense", "streaming", "streaming"]
    q, k, v = make_qkv(1, 90, 90, 4, 2, 16)
    mask = BlockSparseMask(per_head(names, **layouts), 16)
    out = flash_attention(q, k, v, causal=True, mask=mask, impl="triton")
    for head, name in enumerate(names):
        alone = BlockSparseMask(layouts[name], 16) if name in layouts else None
        heads = q[:, :, [head]], k[:, :, [head // 2]], v[:, :, [head // 2]]
        expected = flash_attention(*heads, causal=True, mask=alone, impl="reference")
        torch.testing.assert_close(out[:, :, [head]], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n", SIZES)
def test_random_draws_distinct_blocks_with_the_diagonal(n: int) -> None:
    for n_per_row in {1, min(3, n), n}:
        layout = random(n, n_per_row, seed=1)
        assert (layout.sum(1) == n_per_row).all()
        assert layout.diagonal().all()


def test_random_is_a_function_of_the_seed() -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    layout = random(64, 8, seed=5)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(7)
    assert torch.equal(layout, random(64, 8, seed=5))
    assert not torch.equal(layout, random(64, 8, seed=6))


def test_random_draws_blocks_uniformly() -> None:
    n, n_per_row, n_layouts = 16, 5, 400
    layouts = torch.stack([random(n, n_per_row, seed=seed) for seed in range(n_layouts)])
    p = (n_per_row - 1) / (n - 1)
    sigma = math.sqrt(n_layouts * p * (1 - p))
    others = layouts.sum(0)[~torch.eye(n, dtype=torch.bool)]
    assert (others - n_layouts * p).abs().max() < 5 * sigma


def test_layouts_combine_and_name_their_device() -> None:
    layouts = (
        butterfly(8, device="cpu"),
        sliding_window(8, 2, device="cpu"),
        global_blocks(8, 1, device="cpu"),
        streaming(8, 1, 2, device="cpu"),
        strided(8, 3, device="cpu"),
        random(8, 2, seed=0, device="cpu"),
    )
    with torch.device("meta"):  # as when a model is built; the layout must still hold data
        same = (
            butterfly(8),
            sliding_window(8, 2),
            global_blocks(8, 1),
            streaming(8, 1, 2),
            strided(8, 3),
            random(8, 2, seed=0),
        )
    for layout, expected in zip(same, layouts, strict=True):
        assert (layout.dtype, layout.shape) == (torch.bool, (8, 8))
        assert torch.equal(layout, expected)
    assert torch.equal(
        butterfly(8, global_blocks=2) | sliding_window(8, 2),
        butterfly(8) | global_blocks(8, 2) | sliding_window(8, 2),
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: butterfly(0), r"n_blocks must be at least 1.*got 0"),
        (lambda: butterfly(9, n_factors=5), r"n_factors must be in \[0, 4\] for n_blocks=9, got 5"),
        (lambda: butterfly(8, n_factors=-1), r"n_factors must be in \[0, 3\].*got -1"),
        (lambda: butterfly(4, global_blocks=5), r"global_blocks must be in \[0, 4\].*got 5"),
        (lambda: sliding_window(0, 1), r"n_blocks must be at least 1.*got 0"),
        (lambda: sliding_window(4, 0), r"window_blocks must be at least 1.*got 0"),
        (lambda: global_blocks(4, 5), r"count must be in \[0, 4\] for n_blocks=4, got 5"),
        (lambda: global_blocks(4, -1), r"count must be in \[0, 4\] for n_blocks=4, got -1"),
        (lambda: streaming(0, 1, 1), r"n_blocks must be at least 1.*got 0"),
        (lambda: streaming(4, 5, 1), r"sink_blocks must be in \[0, 4\] for n_blocks=4, got 5"),
        (lambda: streaming(4, 1, 0), r"local_blocks must be at least 1 for n_blocks=4, got 0"),
        (lambda: strided(4, 0), r"stride must be at least 1.*got 0"),
        (lambda: random(0, 1, seed=0), r"n_blocks must be at least 1.*got 0"),
        (lambda: random(4, 5, seed=0), r"n_per_row must be in \[1, 4\] for n_blocks=4, got 5"),
        (lambda: random(4, 0, seed=0), r"n_per_row must be in \[1, 4\].*got 0"),
        (lambda: random(4, 2, seed=-1), r"seed must be in \[0, 2\*\*63\), got -1"),
    ],
)
def test_arguments_out_of_range_are_refused(make: Callable[[], Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("names", "layouts", "message"),
    [
        (["dense"], {}, r"layouts=\[\] must have at least one layout"),
        (["dense"], {"dense": butterfly(4)}, "none named 'dense'"),
        ([], {"local": butterfly(4)}, r"names=\[\] must be a list of \['dense', 'local'\]"),
        ("local", {"local": butterfly(4)}, "names='local' must be a list"),
        (["local", "sparse"], {"local": butterfly(4)}, r"names=\['local', 'sparse'\] must be"),
        (["a"], {"a": butterfly(4), "b": butterfly(8)}, r"b must be .* same shape .* \(8, 8\)"),
        (["a"], {"a": torch.ones(4, 4)}, "a must be a bool tensor .* got torch.float32"),
    ],
)
def test_malformed_mixes_are_refused(
    names: list[str], layouts: dict[str, Tensor], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        per_head(names, **layouts)
