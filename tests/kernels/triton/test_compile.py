"""Every tile choice compiles for the GPUs that it is meant for: this needs no GPU."""

import pytest

from kernels.triton.tiles import BACKWARD_DKDV, BACKWARD_DQ, FORWARD

pytest.importorskip("triton")

TABLES = {"fwd": FORWARD, "dkdv": BACKWARD_DKDV, "dq": BACKWARD_DQ}


@pytest.fixture(scope="module")
def results(printed_by):
    return printed_by("tests/kernels/triton/compile_kernels.py")


@pytest.mark.slow
def test_every_tile_choice_fits_its_gpu(results):
    for result in results:
        assert result["shared"] <= shared_memory(**result), result
        assert result["stack"] <= spilled(**result), result
        assert result["instruction"] == matrix_instruction(**result), result
        # the copy engine loads tiles of 16-bit tensors
        assert result["tma"] == (result["capability"] >= 90 and result["dtype"] != "fp32"), result

    # all entries of all tables, and Blackwell, which has no table of its own
    compiled = {(x["kernel"], x["table"], x["capability"], x["block_d"]) for x in results}
    for kernel, tables in TABLES.items():
        for table, by_head_dim in tables.items():
            capability = 80 if table == "portable" else 90
            assert compiled >= {(kernel, table, capability, d) for d in by_head_dim}
        assert (kernel, "portable", 100, 128) in compiled
    # and what the tables have no dimension for
    assert {x["variant"] for x in results} > {"", "dropout", "mask", "whole blocks", "group"}
    assert {x["dtype"] for x in results} == {"bf16", "fp32"}


@pytest.mark.slow
def test_four_elements_share_the_hash_of_dropout(results):
    """Where nothing is shared, each element takes a stir, and dk, dv half of one for the query."""
    found = [x for x in results if x["variant"] == "dropout"]
    assert {x["kernel"] for x in found} == set(TABLES)
    for result in found:
        tiles = result["tiles"]
        keys = tiles["block_n"] + (tiles["block_n_masked"] or tiles["block_n"])  # of both loops
        elements_of_a_thread = tiles["block_m"] * keys / (32 * tiles["num_warps"])
        most = 1.25 if result["kernel"] == "dkdv" else 0.5
        assert 0 < result["stirs"] < most * elements_of_a_thread, result


def shared_memory(table, capability, **_):
    """Bytes of one program: the smallest Ampere and Ada GPUs have 99 KiB, from the H100 on 227."""
    return 1024 * (99 if table == "portable" and capability == 80 else 227)


def spilled(kernel, table, block_d, variant, **_):
    """Bytes of stack that a thread may have: the fastest tiles measured on an H100 spill some.

    Registers are scarce where there are two accumulators, of dk and dv, or a wide one, where
    dropout hashes, and where more programs share them.
    """
    scarce = block_d >= 128 or variant == "dropout" or table == "hopper, short"
    if kernel == "dkdv" or (kernel == "fwd" and scarce):
        return 256
    return 48


def matrix_instruction(capability, dtype, precision, **_):
    """What multiplies the tiles: on Hopper the fast one takes tiles that 4 warps can share."""
    if dtype == "fp32":
        # no matrix unit multiplies IEEE fp32
        return "fma" if precision == "ieee" else "mma"
    return {80: "mma", 90: "wgmma", 100: "tcgen05"}[capability]


@pytest.mark.slow
def test_kernels_of_a_step_fit_every_gpu_and_spill_next_to_nothing(printed_by):
    found = printed_by("tests/kernels/fused/triton/compile_kernels.py")
    assert {x["capability"] for x in found} == {80, 90, 100}
    assert {x["dtype"] for x in found} == {"bf16", "fp32"}
    for result in found:
        # Blackwell, where nothing was measured, keeps up to four registers in memory
        assert result["stack"] <= (16 if result["capability"] == 100 else 0), result
        assert result["shared"] <= 1024 * 99, result
