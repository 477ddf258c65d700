"""Choice of tiles: from the tables, from a file of measurements, and within a mask's blocks."""

import json
import os
from dataclasses import asdict

import pytest
import torch

from kernels.checks import MAX_ROW_STRIDE
from kernels.mask.block_mask import BlockSparseMask
from kernels.options import AttentionOptions
from kernels.triton.tiles import FP32, MAX_BLOCK, TABLES, Tiles

tuning = pytest.importorskip("kernels.triton.tuning")


def test_no_tile_is_too_large_for_its_offsets():
    choices = [*FP32.values(), *(t for tables in TABLES.values() for d in tables.values()
                                 for t in d.values())]  # fmt: skip
    assert max(max(t.block_m, t.block_n) for t in choices) <= MAX_BLOCK
    assert (MAX_BLOCK - 1) * MAX_ROW_STRIDE + 256 < 2**31


@pytest.mark.parametrize("block_size", [16, 64, 256])
def test_a_tile_is_within_a_block_of_the_mask(block_size):
    q = torch.empty(1, 300, 1, 40, dtype=torch.float16)
    options = AttentionOptions(mask_block_size=block_size)
    for tiles in (
        tuning.forward_tiles(q, q, options),
        tuning.backward_dq_tiles(q, q, options),
        tuning.backward_dkdv_tiles(q, q, options),
    ):
        assert tiles.block_d == 64
        for block in (tiles.block_m, tiles.block_n, tiles.block_n_masked):
            assert 16 <= block <= block_size and block_size % block == 0


@pytest.mark.parametrize(
    ("seq_q", "seq_k", "options", "keys"),
    [
        (1000, 1000, {}, 1000),
        (1000, 1000, {"causal": True}, 500),
        (100, 1000, {"causal": True}, 950),  # the last queries of a long context
        (1000, 100, {"causal": True}, 50),
        (1000, 1000, {"causal": True, "window_size": 100}, 100),
        (1000, 1000, {"window_size": 100}, 200),
        (1000, 1000, {"causal": True, "window_size": 900}, 500),
    ],
)
def test_keys_per_query(seq_q, seq_k, options, keys):
    q, k = torch.empty(1, seq_q, 1, 64), torch.empty(1, seq_k, 1, 64)
    assert tuning.keys_per_query(q, k, AttentionOptions(**options)) == keys


def test_keys_per_query_under_a_mask():
    layout = torch.zeros(2, 4, 4, dtype=torch.bool)
    layout[0, :, 0] = layout[1, 0] = True  # head 0: one block per row; head 1: four in a single row
    lists = BlockSparseMask(layout, 32).lists(128, 128)
    options = AttentionOptions(
        mask_rows=lists.rows, mask_row_blocks=lists.row_blocks, mask_block_size=32
    )
    q = torch.empty(1, 128, 2, 64)
    assert tuning.keys_per_query(q, q, options) == 32


@pytest.mark.parametrize(
    ("seq_q", "seq_k", "options", "masked"),
    [
        (256, 1024, {}, False),
        (256, 1024, {"softcap": 20.0, "sinks": torch.zeros(1)}, False),
        (256, 1000, {}, True),
        (200, 1024, {}, True),
        (256, 256, {"causal": True}, True),
        (256, 256, {"window_size": 8}, True),
        (256, 256, {"kv_lengths": torch.tensor([200])}, True),
        (256, 256, {"doc_start": torch.zeros(1, 256)}, True),
    ],
)
def test_without_masked_tiles_there_is_no_masked_loop(seq_q, seq_k, options, masked):
    q, k = torch.empty(1, seq_q, 1, 64), torch.empty(1, seq_k, 1, 64)
    features = tuning.launch_options(q, k, AttentionOptions(**options))["features"]
    assert features.unmasked_loop and features.masked_loop is masked


@pytest.fixture
def hopper(cache, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    tuning._choose.cache_clear()
    yield
    tuning._choose.cache_clear()


def chosen(kernel, head_dim, *exceptions, mask_block_size=0):
    device = torch.device("cuda")
    return tuning._choose(kernel, exceptions, head_dim, False, device, mask_block_size)


def test_the_first_exception_for_a_head_dim_is_chosen(hopper):
    both = ("hopper, short", "hopper, causal")
    for head_dim, table in ((64, "hopper, short"), (128, "hopper, causal"), (32, "hopper")):
        tiles = chosen("forward", head_dim, *both)
        table_tiles = TABLES["forward"][table][head_dim]
        assert (tiles.block_m, tiles.block_n) == (table_tiles.block_m, table_tiles.block_n)
        assert tiles.max_registers == table_tiles.max_registers
    assert chosen("forward", 64).block_n != chosen("forward", 64, *both).block_n


def test_measured_tiles_replace_exceptions(hopper):
    tuning.use_measured_tiles("forward", "GPU", 64, Tiles(32, 32, 4, 2))
    assert chosen("forward", 64, "hopper, short").block_m == 32


def test_every_exception_is_in_a_table():
    names = {name for tables in TABLES.values() for name in tables}
    short = torch.empty(1, 128, 2, 64)
    one_head = torch.empty(1, 128, 1, 64)
    calls = []
    for name in ("forward_tiles", "backward_dq_tiles", "backward_dkdv_tiles"):
        for k, options in (
            (short, AttentionOptions(causal=True)),
            (one_head, AttentionOptions()),
            (short, AttentionOptions(mask_block_size=64, mask_loops=1)),
            (short, AttentionOptions(mask_block_size=64, mask_loops=3)),
        ):
            calls.append((name, k, options))
    used = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "_tiles", lambda kernel, exceptions, *_: used.update(exceptions))
        for name, k, options in calls:
            getattr(tuning, name)(short, k, options)
    assert used == {name for name in names if "," in name}


@pytest.mark.parametrize(
    "options, exceptions",
    [
        ({}, ()),
        ({"causal": True}, ()),
        ({"dropout_p": 0.1}, ("hopper, small",)),
        ({"softcap": 20.0}, ("hopper, small",)),
        ({"mask_block_size": 64, "mask_loops": 1}, ("hopper, whole",)),
        ({"mask_block_size": 64, "mask_loops": 1, "dropout_p": 0.1}, ("hopper, whole",)),
        ({"mask_block_size": 64, "mask_loops": 3}, ("hopper, small",)),
    ],
)
def test_exceptions_of_the_dkdv_kernel(options, exceptions, monkeypatch):
    monkeypatch.setattr(tuning, "_tiles", lambda kernel, exceptions, *_: exceptions)
    q = torch.empty(1, 128, 2, 64)
    assert tuning.backward_dkdv_tiles(q, q, AttentionOptions(**options)) == exceptions


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PAPILIO_CACHE", str(tmp_path))
    tuning.measured_tiles.cache_clear()
    yield tmp_path
    tuning.measured_tiles.cache_clear()


def test_without_a_file_there_are_no_measured_tiles(cache):
    assert tuning.measured_tiles("GPU 1") == {kernel: {} for kernel in TABLES}


def test_measured_tiles_are_read_back(cache):
    tiles = Tiles(64, 32, 4, 2, max_registers=128)
    file = tuning.measured_tiles_file("GPU 1")
    assert file.parent == cache and file.name.startswith("tiles-GPU-1-triton-")
    file.write_text(json.dumps({kernel: {"64": asdict(tiles)} for kernel in TABLES}))
    assert tuning.measured_tiles("GPU 1") == {kernel: {64: tiles} for kernel in TABLES}
    assert tuning.measured_tiles("GPU 2")["forward"] == {}


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"forward": {}}', '{"forward": {"64": {"x": 1}}}', "[" * 100_000]
)
def test_a_damaged_file_is_named(cache, text):
    tuning.measured_tiles_file("GPU").write_text(text)
    with pytest.raises(ValueError, match="tiles-GPU.*delete it, or measure again"):
        tuning.measured_tiles("GPU")


def test_a_pipe_is_refused_without_waiting(cache):
    os.mkfifo(tuning.measured_tiles_file("GPU"))
    with pytest.raises(ValueError, match="tiles-GPU.*it is not a file of a few lines"):
        tuning.measured_tiles("GPU")


@pytest.mark.gpu
def test_tuning_saves_its_measurements(cache, monkeypatch):
    from scripts import tune_attention

    too_large = Tiles(128, 128, 4, 5)
    monkeypatch.setattr(
        tune_attention, "candidates", lambda: iter([Tiles(64, 32, 4, 2), too_large])
    )
    tune_attention.main(["--head-dims", "256", "--seq-len", "256"])
    (file,) = cache.iterdir()
    saved = json.loads(file.read_text())
    tuning.measured_tiles.cache_clear()
    read = tuning.measured_tiles(torch.cuda.get_device_name())
    assert {k: {int(d): Tiles(**t) for d, t in v.items()} for k, v in saved.items()} == read
    assert all(tiles in ({}, {256: Tiles(64, 32, 4, 2)}) for tiles in read.values())
