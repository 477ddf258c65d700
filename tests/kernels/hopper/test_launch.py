"""Tensor maps, parameters and counters of a launch."""

import struct
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from kernels.hopper import driver, launch
from kernels.hopper.launch import (
    TensorMaps,
    TileCounters,
    parameter_layout,
    tile_map,
    vector_map,
)

CPU = torch.device("cpu")


@pytest.fixture
def capturing(monkeypatch):
    """Stand-in for a GPU: its stream is being captured while the last item of the list is True."""
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
    stream_pair = counters.pair(CPU, 1)
    capturing.append(True)
    taken = [counters.pair(CPU, 1).data_ptr() for _ in range(5)]
    assert len({stream_pair.data_ptr(), *taken}) == 6


def test_a_graph_that_is_captured_first_keeps_its_own_counters(capturing):
    """A graph allows no reference to a tensor in its memory pool that outlives the call."""
    counters = TileCounters()
    capturing.append(True)
    pair = weakref.ref(counters.pair(CPU, 1))
    assert pair() is None
    capturing.append(False)
    assert not counters.pair(CPU, 1).any()


def test_counters_are_allocated_outside_of_this_threads_memory_pools(capturing, monkeypatch):
    threads = []
    stream = SimpleNamespace(synchronize=lambda: threads.append(threading.get_ident()))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    TileCounters().pair(CPU, 1)
    assert len(threads) == 1 and threads[0] != threading.get_ident()


def test_any_number_of_pairs_is_zeroed_and_aligned(capturing):
    counters = TileCounters()
    taken = [counters.pair(CPU, stream) for stream in range(TileCounters._CHUNK + 10)]
    assert all(not pair.any() for pair in taken)
    assert {pair.data_ptr() % 16 for pair in taken} == {0}
    assert len({pair.data_ptr() for pair in taken}) == len(taken)


@pytest.fixture
def encoded(monkeypatch):
    """Arguments of the tensor maps that the driver encodes, newest last."""
    calls = []

    def tensor_map(*arguments):
        calls.append(arguments)
        return bytes([len(calls)])

    monkeypatch.setattr(driver, "tensor_map", tensor_map)
    caches = (launch._tensor_map, launch.vector_map)
    for cache in caches:
        cache.cache_clear()
    yield calls
    for cache in caches:
        cache.cache_clear()


def test_a_packed_projection_is_described_by_its_own_strides(encoded):
    q, _, _ = torch.zeros(2, 10, 3, 4, 64).half().unbind(2)
    tile_map(q, 32)
    strides = (10 * 3 * 4 * 64, 64, 3 * 4 * 64, 1)
    assert encoded == [(q.data_ptr(), torch.float16, (2, 4, 10, 64), strides, (1, 1, 32, 64))]


def test_a_tensor_is_encoded_once_per_description(encoded):
    x = torch.zeros(2, 10, 4, 64).half()
    first, _ = tile_map(x, 32)
    assert tile_map(x.view(2, 10, 4, 64), 32)[0] == first
    others = [x.bfloat16(), x[1:], x[:, :9], x.view(2, 10, 2, 128), x.view(2, 4, 10, 64)]
    maps = [tile_map(other, 32)[0] for other in others]
    assert len({first, tile_map(x, 64)[0], *maps}) == 7


def test_the_stride_of_a_single_element_may_be_anything(encoded):
    x = torch.zeros(3 * 64).half().as_strided((1, 3, 1, 64), (1, 64, 7, 1))
    assert tile_map(x, 32)[1] is x
    assert encoded[0][3] == (8, 8, 64, 1)


def test_tensors_off_16_byte_boundaries_are_copied(encoded):
    x = torch.randn(2 * 3 * 4 * 64 + 1).half()
    even, shifted = (x[start:][: 2 * 3 * 4 * 64].view(2, 3, 4, 64) for start in (0, 1))
    padded = torch.randn(2, 3, 4, 68).half()[..., :64]  # heads are 8 bytes too far apart
    shared = torch.randn(2, 1, 4, 64).half().expand(-1, 3, -1, -1)
    assert tile_map(even, 32)[1] is even
    for odd in (shifted, padded, shared):
        _, copy = tile_map(odd, 32)
        assert torch.equal(copy, odd)
        assert copy.is_contiguous()
        # an earlier copy may have had this address, and then its tensor map is reused
        assert copy.data_ptr() in [address for address, *_ in encoded]
        assert copy.data_ptr() % 16 == 0


def test_maps_of_one_address_distinguish_strides(encoded):
    maps = TensorMaps(32)
    storage = torch.zeros(2 * 10 * 3 * 4 * 64).half()
    packed = storage.view(2, 10, 3, 4, 64)[:, :, 0]
    own = storage[: 2 * 10 * 4 * 64].view(2, 10, 4, 64)
    assert packed.data_ptr() == own.data_ptr() and packed.shape == own.shape
    first = [maps(x)[0] for x in (packed, own)]
    assert first[0] != first[1]
    assert [maps(x)[0] for x in (packed, own)] == first and len(encoded) == 2
    odd = torch.randn(2 * 10 * 4 * 64 + 1).half()[1:].view(2, 10, 4, 64)
    assert all(maps(odd)[1] is not odd for _ in range(2))


def test_a_vector_is_encoded_once(encoded):
    x = torch.zeros(16, 128)
    vector_map(x.data_ptr(), x.numel(), 128)
    vector_map(x.data_ptr(), x.numel(), 128)
    assert encoded == [(x.data_ptr(), torch.float32, (2048,), (1,), (128,))]


def test_a_thread_without_a_context_gets_one(monkeypatch):
    """The driver refuses such a thread: only the refused call is repeated."""
    attempts = []

    def refuse_without_context(*arguments):
        attempts.append(arguments)
        return 0 if contexts else 201  # CUDA_ERROR_INVALID_CONTEXT

    contexts = []
    library = SimpleNamespace(
        cuTensorMapEncodeTiled=refuse_without_context,
        cuDevicePrimaryCtxRetain=lambda context, device: 0,
        cuCtxSetCurrent=lambda context: contexts.append(context) or 0,
    )
    monkeypatch.setattr(driver, "_libcuda", lambda: library)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for expected in (2, 3):
        driver.tensor_map(16, torch.float16, (2, 3, 4, 64), (768, 256, 64, 1), (1, 1, 4, 64))
        assert len(attempts) == expected
    assert len(contexts) == 1


_MAP = ".param .align 64 .b8 p[128]"
_SIZES_AND_STRIDES = [".param .u32 p"] * 4 + [".param .u64 p"] * 4
_POINTER = ".param .u64 .ptr .global .align 1 p"
PARAMETERS = [
    *(_MAP, *_SIZES_AND_STRIDES, ".param .u32 p"),
    *(_MAP, *_SIZES_AND_STRIDES, ".param .f32 p", _POINTER),
    *(_POINTER, _POINTER),  # scratch
]
PTX = ".visible .entry f(\n\t" + ",\n\t".join(PARAMETERS) + "\n)\n.reqntid 640\n"


def test_parameters_are_where_ptx_declares_them():
    layout, offsets = parameter_layout(PTX)
    packed = layout.pack(bytes([1] * 128), -2, bytes([3] * 128), 0.5, 2**40)
    values = {0: bytes([1] * 128), 176: struct.pack("<i", -2), 192: bytes([3] * 128)}
    values |= {368: struct.pack("<f", 0.5), 376: struct.pack("<Q", 2**40)}
    expected = bytearray(400)
    for offset, value in values.items():
        expected[offset : offset + len(value)] = value
    assert packed == expected
    assert [offsets[i] for i in (0, 9, 10, 19, 20, 21, 22)] == [0, 176, 192, 368, 376, 384, 392]
