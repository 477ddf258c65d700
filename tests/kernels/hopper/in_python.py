"""Stand-ins for Gluon, so that the arithmetic of kernels runs in Python, and random calls."""

from types import SimpleNamespace

import numpy as np
import torch

from kernels.mask.block_mask import BlockSparseMask
from kernels.options import Features
from kernels.reference.standard import visible_keys


class Pointer:
    """Pointer to a number of an array, as in a kernel."""

    def __init__(self, array, at=0):
        self.array, self.at = array.reshape(-1), at

    def __add__(self, offset):
        return Pointer(self.array, self.at + offset)

    def load(self, mask=True, other=None):
        if not mask:
            return other
        value = self.array[self.at]
        return Number(value) if np.ndim(value) == 0 else value


class Number(int):
    """Scalar, as in a kernel."""

    def to(self, dtype):
        return self


GL = SimpleNamespace(
    minimum=np.minimum,
    maximum=np.maximum,
    where=np.where,
    min=lambda x, axis: x.min(axis),
    max=lambda x, axis: x.max(axis),
    cdiv=lambda a, b: int((a + b - 1) / b),  # a GPU truncates
    arange=lambda start, end, layout: np.arange(start, end),
    load=Pointer.load,
    static_range=range,
    BlockedLayout=lambda *_: None,
    num_warps=lambda: 1,
    int64=np.int64,
)


def packed_in_python(monkeypatch):
    """The functions for packed lists, as plain Python."""
    from kernels.hopper import block_list  # needs Triton

    for name in ("PART", "ALL_PARTS"):
        monkeypatch.setattr(block_list, name, getattr(block_list, name).value)
    return {name: getattr(block_list, name).fn for name in ("number_of", "parts_of", "in_parts")}


def all_in_parts(in_parts, parts):
    """(64, 64) bool: the pairs of queries and keys that the parts of a block of 64 cover."""
    n = np.arange(64)
    return torch.from_numpy(in_parts(int(parts), n[:, None], n[None]))


def random_call(draw):
    """Draw the lengths, features and options of a call at random."""
    seq_q, seq_k = draw.randint(1, 700), draw.randint(1, 700)
    if draw.random() < 0.4:
        seq_q = seq_k = draw.choice([seq_k, 64, 128, 192, 256, 640])
    window_size = draw.choice([1, 2, 17, 64, 100, 128, 200, 500])
    names = ("causal", "window", "documents", "lengths")
    used = {name: draw.random() < 0.4 for name in names}
    used["causal"] |= draw.random() < 0.3
    used["window"] &= window_size < max(seq_q, seq_k)
    numbers = np.random.default_rng(draw.randint(0, 2**31))
    doc_start = numbers.integers(-50, seq_k + 50, (1, seq_q))  # any numbers are valid
    if draw.random() < 0.5:
        doc_start.sort(axis=1)
    return seq_q, seq_k, Features(**used), window_size, doc_start, numbers.integers(0, seq_k + 1, 1)


def document_bounds(doc_start, n_tiles, tile_size):
    """`kernels.triton.document_bounds` by its definition, on numpy arrays."""
    batch, seq_q = doc_start.shape
    tiles = np.empty((batch, n_tiles, 2), np.int32)
    blocks = np.empty((batch, -(-seq_q // 128)), np.int32)
    for starts, sample_tiles, sample_blocks in zip(doc_start, tiles, blocks, strict=True):
        for tile in range(n_tiles):
            hiding = np.flatnonzero(starts > tile * tile_size)
            showing = np.flatnonzero(starts < (tile + 1) * tile_size)
            sample_tiles[tile] = min(hiding, default=seq_q), max(showing + 1, default=0)
        sample_blocks[:] = [starts[block * 128 :].min() for block in range(len(sample_blocks))]
    return tiles, blocks


def visible_pairs(seq_q, seq_k, features, window_size, doc_start, kv_lengths):
    """(T_q, T_k) bool: the keys that each query of a call sees, from the reference."""
    return visible_keys(
        seq_q,
        seq_k,
        causal=features.causal,
        window_size=window_size if features.window else None,
        doc_start=torch.tensor(doc_start) if features.documents else None,
        kv_lengths=torch.tensor(kv_lengths) if features.lengths else None,
    ).view(seq_q, seq_k)


def random_block_mask(draw, seq_q, seq_k, block_size, n_head):
    """Random block mask with some empty rows and columns, and sometimes with a full column."""
    n_q, n_k = -(-seq_q // block_size), -(-seq_k // block_size)
    layout = np.random.default_rng(draw.randint(0, 2**31)).random((n_head, n_q, n_k)) < 0.5
    layout[:, draw.randint(0, 6) :: 7] = False
    layout[:, :, draw.randint(0, 6) :: 7] = False
    if draw.random() < 0.5:
        layout &= np.random.default_rng(draw.randint(0, 2**31)).random((n_head, n_q, n_k)) < 0.2
        layout[:, :, draw.randint(0, n_k - 1)] = True
    return BlockSparseMask(torch.from_numpy(layout), block_size)
