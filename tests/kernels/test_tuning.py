"""Which tiles a call gets: from the tables, from a file of measurements, and a mask's limit."""

import json
from dataclasses import asdict

import pytest
import torch

from kernels.options import AttentionOptions
from kernels.strides import MAX_ROW_STRIDE
from kernels.tiles import FP32, MAX_BLOCK, TABLES, Tiles

tuning = pytest.importorskip("kernels.tuning")


def test_no_tile_is_larger_than_what_offsets_allow():
    choices = [*FP32.values(), *(t for tables in TABLES.values() for d in tables.values()
                                 for t in d.values())]  # fmt: skip
    assert max(max(t.block_m, t.block_n) for t in choices) <= MAX_BLOCK
    assert (MAX_BLOCK - 1) * MAX_ROW_STRIDE + 256 < 2**31


@pytest.mark.parametrize("block_size", [16, 64, 256])
def test_a_tile_lies_within_a_block_of_the_mask(block_size):
    q = torch.empty(1, 300, 1, 40, dtype=torch.float16)
    options = AttentionOptions(mask_block_size=block_size)
    for tiles in (
        tuning.forward_tiles(q, q, options),
        tuning.backward_dq_tiles(q, options),
        tuning.backward_dkdv_tiles(q, q, options),
    ):
        assert tiles.block_d == 64
        for block in (tiles.block_m, tiles.block_n, tiles.block_n_masked):
            assert 16 <= block <= block_size and block_size % block == 0


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PAPILIO_CACHE", str(tmp_path))
    tuning.measured_tiles.cache_clear()
    yield tmp_path
    tuning.measured_tiles.cache_clear()


def test_without_a_file_nothing_is_measured(cache):
    assert tuning.measured_tiles("GPU 1") == {kernel: {} for kernel in TABLES}


def test_measured_tiles_are_read_back(cache):
    tiles = Tiles(64, 32, 4, 2, max_registers=128)
    file = tuning.measured_tiles_file("GPU 1")
    assert file.parent == cache and file.name.startswith("tiles-GPU-1-triton-")
    file.write_text(json.dumps({kernel: {"64": asdict(tiles)} for kernel in TABLES}))
    assert tuning.measured_tiles("GPU 1") == {kernel: {64: tiles} for kernel in TABLES}
    assert tuning.measured_tiles("GPU 2")["forward"] == {}


@pytest.mark.parametrize("text", ["{", "[]", '{"forward": {}}', '{"forward": {"64": {"x": 1}}}'])
def test_a_damaged_file_is_named(cache, text):
    tuning.measured_tiles_file("GPU").write_text(text)
    with pytest.raises(ValueError, match="tiles-GPU.*delete it, or measure again"):
        tuning.measured_tiles("GPU")


@pytest.mark.gpu
def test_tuning_keeps_what_it_measured(cache, monkeypatch):
    from scripts import tune_attention

    too_large = Tiles(128, 128, 4, 5)
    monkeypatch.setattr(
        tune_attention, "candidates", lambda: iter([Tiles(64, 32, 4, 2), too_large])
    )
    tune_attention.main(["--head-dims", "256", "--seq-len", "256"])
    (file,) = cache.iterdir()
    kept = json.loads(file.read_text())
    tuning.measured_tiles.cache_clear()
    read = tuning.measured_tiles(torch.cuda.get_device_name())
    assert {k: {int(d): Tiles(**t) for d, t in v.items()} for k, v in kept.items()} == read
    assert all(tiles in ({}, {256: Tiles(64, 32, 4, 2)}) for tiles in read.values())
