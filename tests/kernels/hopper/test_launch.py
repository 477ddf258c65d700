"""Which launches share the counters that hand out row tiles."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from kernels.hopper.launch import TileCounters, tiled

CPU = torch.device("cpu")


@pytest.fixture
def capturing(monkeypatch):
    """A GPU whose stream is being captured while the list holds True."""
    state = [False]
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state[-1])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    return state


def test_launches_on_one_stream_share_a_pair_of_counters(capturing):
    counters = TileCounters()
    assert counters.pair(CPU, 1) is counters.pair(CPU, 1)
    assert counters.pair(CPU, 1).data_ptr() != counters.pair(CPU, 2).data_ptr()


def test_each_captured_launch_has_a_pair_of_its_own(capturing):
    counters = TileCounters()
    of_stream = counters.pair(CPU, 1)
    capturing.append(True)
    taken = [counters.pair(CPU, 1).data_ptr() for _ in range(5)]
    assert len({of_stream.data_ptr(), *taken}) == 6


def test_pairs_begin_at_zero_and_aligned_however_many_are_taken(capturing):
    counters = TileCounters()
    taken = [counters.pair(CPU, stream) for stream in range(TileCounters._CHUNK + 10)]
    assert all(not pair.any() for pair in taken)
    assert {pair.data_ptr() % 16 for pair in taken} == {0}
    assert len({pair.data_ptr() for pair in taken}) == len(taken)


def test_a_packed_projection_is_described_by_its_own_strides():
    q, _, _ = torch.zeros(2, 10, 3, 4, 64).unbind(2)
    described = tiled(q)
    assert described.shape == (2, 4, 10, 64)
    assert described.strides == (10 * 3 * 4 * 64, 64, 3 * 4 * 64, 1)


def test_the_stride_of_a_single_element_may_be_anything():
    x = torch.zeros(3 * 64).as_strided((1, 3, 1, 64), (1, 64, 7, 1))
    assert tiled(x).strides == (8, 8, 64, 1)


def test_what_begins_or_strides_between_16_bytes_is_copied():
    x = torch.randn(2 * 3 * 4 * 64 + 1).half()
    aligned, shifted = (x[start:][: 2 * 3 * 4 * 64].view(2, 3, 4, 64) for start in (0, 1))
    padded = torch.randn(2, 3, 4, 68).half()[..., :64]  # 8 bytes too far from head to head
    shared = torch.randn(2, 1, 4, 64).half().expand(-1, 3, -1, -1)
    assert tiled(aligned).base is aligned
    for odd in (shifted, padded, shared):
        copy = tiled(odd)
        assert torch.equal(copy.base, odd)
        assert copy.base.data_ptr() % 16 == 0
        assert copy.strides == (3 * 4 * 64, 64, 4 * 64, 1)
