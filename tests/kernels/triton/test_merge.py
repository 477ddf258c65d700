"""Merged attention over two sets of keys against attention over both."""

import math

import pytest
import torch

from kernels.context.ring import merge_module
from kernels.options import AttentionOptions
from kernels.reference import partial
from kernels.testing import make_qkv
from tests.kernels.grids import each_of


@each_of(
    ["impl", "dtype", "device"],
    [
        ("reference", torch.float64, "cpu"),
        ("reference", torch.bfloat16, "cpu"),
        ("triton", torch.float32, "cpu"),
    ],
    [("triton", torch.bfloat16, "cuda"), ("triton", torch.float32, "cuda")],
)
@pytest.mark.parametrize("rows", [slice(0, 7), slice(3, 7)], ids=["all rows", "some"])
@pytest.mark.parametrize("head_dim", [8, 24])
def test_merging_matches_attention_of_all_keys(impl, dtype, device, rows, head_dim):
    merge = merge_module(impl).merge
    q, k, v = make_qkv(2, 7, 12, 3, 3, head_dim, dtype=dtype, device=device)

    def attend(doc_start, keys):
        starts = torch.tensor(doc_start, dtype=torch.int32, device=device).expand(2, -1)
        options = AttentionOptions(doc_start=starts)
        return partial.attn_fwd(q[:, : len(doc_start)], k[:, keys], v[:, keys], options)

    # some queries see keys of both sets, one of the second alone, one of neither
    starts = [0, 1, 5, 4, 12, 3, 0]
    out, lse = attend([min(x, 5) for x in starts], slice(0, 5))
    part, part_lse = attend([max(x - 5, 0) for x in starts], slice(5, 12))
    expected, expected_lse = attend(starts, slice(0, 12))
    expected[:, : rows.start], expected_lse[:, :, : rows.start] = (
        out[:, : rows.start],
        lse[:, :, : rows.start],
    )
    merge(
        out[:, rows],
        lse[:, :, rows],
        part[:, rows].contiguous(),
        part_lse[:, :, rows].contiguous(),
    )
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(out, expected, **tolerance)
    torch.testing.assert_close(lse, expected_lse)
    assert (lse[:, :, 4] == -math.inf).all() and (out[:, 4] == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_repeats_bit_for_bit(dtype):
    """Several warps of a program read one row, and none reads what another has written."""
    generator = torch.Generator("cuda").manual_seed(0)

    def numbers(*shape):
        return torch.randn(shape, device="cuda", generator=generator)

    out, part = (numbers(2, 8192, 12, 64).to(dtype) for _ in range(2))
    lse, part_lse = (5 * numbers(2, 12, 8192) for _ in range(2))
    expected = out.clone(), lse.clone()
    partial.merge(*expected, part, part_lse)
    for _ in range(100):
        merged = out.clone(), lse.clone()
        merge_module("triton").merge(*merged, part, part_lse)
        for actual, wanted in zip(merged, expected, strict=True):
            torch.testing.assert_close(actual, wanted)
