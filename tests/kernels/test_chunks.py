"""Dropout and masks of a chunk of queries are those of the whole sequence."""

import pytest
import torch

from kernels import BlockSparseMask
from kernels.context.interface import attend_chunk
from kernels.mask.patterns import butterfly
from kernels.options import make_options
from kernels.reference.standard import dropout_keep_mask, standard_attention
from kernels.testing import make_qkv
from tests.kernels.grids import each_of
from tests.kernels.masks import random_mask

CHUNKS = [(0, 16), (16, 48), (80, 96)]


def test_dropout_of_a_chunk_matches_its_rows():
    sizes = {"batch": 2, "n_head": 3, "seq_k": 40, "dropout_p": 0.4}
    whole = dropout_keep_mask(2**40 + 1, seq_q=96, **sizes)
    for begin, end in CHUNKS:
        rows = dropout_keep_mask(2**40 + 1, seq_q=end - begin, first_query=begin, **sizes)
        assert torch.equal(rows, whole[:, :, begin:end])


@each_of(
    ["impl", "dtype", "device"],
    [("triton", torch.float32, "cpu"), ("reference", torch.float32, "cpu")],
    [(impl, torch.float16, "cuda") for impl in ("triton", "hopper")],
)
def test_a_chunk_drops_the_same_elements(impl, dtype, device):
    q, k, v = make_qkv(2, 96, 96, 2, 1, 16, dtype=dtype, device=device, requires_grad=True)
    dropout = {"causal": True, "dropout_p": 0.3, "dropout_seed": 11}
    expected = standard_attention(q, k, v, **dropout)[0]
    tolerance = {"rtol": 0, "atol": 2e-5 if dtype == torch.float32 else 2e-2}
    for begin, end in CHUNKS:

        def attend(q, k, v, rows=slice(begin, end)):
            n = rows.stop
            q, k, v = q[:, rows], k[:, :n], v[:, :n]
            options = make_options(q, k, v, **dropout)._replace(first_query=rows.start)
            return attend_chunk(q, k, v, options, impl)

        actual = attend(q, k, v)
        torch.testing.assert_close(actual, expected[:, begin:end], **tolerance)
        dout = torch.randn_like(actual)
        torch.testing.assert_close(
            torch.autograd.grad(actual, (q, k, v), dout),
            torch.autograd.grad(expected[:, begin:end], (q, k, v), dout, retain_graph=True),
            **tolerance,
        )


def test_parts_of_a_mask():
    mask = random_mask(128, 128, n_head=2)
    dense = mask.to_dense(128, 128).unflatten(2, (4, 32)).unflatten(1, (4, 32))
    for rows, keys in (((0,), (0,)), ((3,), (0, 1, 2, 3)), ((0, 3), (1, 2)), ((1, 2), (2,))):
        (part,) = mask.parts(((rows, keys),), 4, 128)
        part_dense = part.to_dense(32 * len(rows), 32 * len(keys))
        assert torch.equal(part_dense, dense[:, rows][:, :, :, keys].flatten(3).flatten(1, 2))
        assert mask.parts((((2,), (2,)), (rows, keys)), 4, 128)[1] is part


def test_a_mask_cut_within_its_blocks_is_refused():
    mask = BlockSparseMask(butterfly(4), 16)
    with pytest.raises(ValueError, match="8 chunks of 8, which the mask's blocks of 16 do not"):
        mask.parts((((0,), (0,)),), 8, 64)
    with pytest.raises(ValueError, match="multiple of 128, or smaller blocks"):
        mask.parts((((0,), (0,)),), 8, 64)
    with pytest.raises(ValueError, match="seq_q=128 needs"):
        mask.parts((((0,), (0,)),), 4, 128)


def test_compiled_code_uses_the_chunk_of_its_mask():
    @torch.compile(backend="aot_eager", fullgraph=True)
    def attend(q, k, v, mask):
        q, k, v = q[:, 32:64], k[:, :64], v[:, :64]
        (part,) = mask.parts((((1,), (0, 1)),), 4, 128)
        options = make_options(q, k, v, causal=True, mask=part)._replace(first_query=32)
        return attend_chunk(q, k, v, options, "triton")

    torch.compiler.reset()
    q, k, v = make_qkv(1, 128, 128, 2, 2, 16)
    for n_factors in (1, 3):
        mask = BlockSparseMask(butterfly(8, n_factors=n_factors), 16)
        expected = standard_attention(q, k, v, causal=True, mask=mask)[0][:, 32:64]
        torch.testing.assert_close(attend(q, k, v, mask), expected, rtol=1e-4, atol=1e-5)
