"""Document bounds against their definition."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from kernels.triton.document_bounds import document_bounds
from tests.kernels.grids import each_of
from tests.kernels.hopper import in_python


@each_of(["device"], [("cpu",)], [("cuda",)])
@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize(
    "seq_q, n_tiles, tile_size", [(1, 1, 16), (700, 9, 64), (1100, 40, 32), (3000, 2, 64)]
)
def test_bounds_of_any_documents(seq_q, n_tiles, tile_size, in_order, device):
    seq_k = n_tiles * tile_size - 5
    numbers = np.random.default_rng(seq_q)
    doc_start = numbers.integers(-20, n_tiles * tile_size + 50, (3, seq_q), np.int32)
    if in_order:
        doc_start.sort(axis=1)
    doc_start[2] = 5 * tile_size - 1  # one document, which starts at the last key of a tile
    tiles, blocks = document_bounds(torch.from_numpy(doc_start).to(device), seq_k, tile_size)
    expected_tiles, expected_blocks = in_python.document_bounds(doc_start, n_tiles, tile_size)
    np.testing.assert_array_equal(tiles.cpu().numpy(), expected_tiles)
    np.testing.assert_array_equal(blocks.cpu().numpy(), expected_blocks)
