import pytest
import torch

pytest.importorskip("triton")

import triton.language as tl

from kernels.fused.triton.addresses import AddressTable, are_aligned, dtype_of

CPU = torch.device("cpu")


def test_tables_are_rebuilt_only_if_tensors_move():
    x, y, table = torch.zeros(8), torch.zeros(8), AddressTable()
    first = table.update([x, None, y], CPU)
    assert first.tolist() == [x.data_ptr(), 0, y.data_ptr()] and first.dtype == torch.int64
    assert table.update([x, None, y], CPU) is first
    assert table.update([y, None, x], CPU).tolist() == [y.data_ptr(), 0, x.data_ptr()]


def test_alignment():
    x = torch.zeros(16)
    assert are_aligned([x, None, x[4:]]) and not are_aligned([x, x[1:]])


def test_dtype_of_casts():
    half = torch.zeros(2, dtype=torch.float16)
    assert dtype_of([None, half, half]) is tl.float16
    assert dtype_of([None, half.bfloat16()]) is tl.bfloat16
    assert dtype_of([None]) is None
