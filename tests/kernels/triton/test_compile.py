"""Every tile choice compiles for its GPUs: this needs no GPU."""

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
    # and variants that the tables do not distinguish
    assert {x["variant"] for x in results} > {"", "dropout", "mask", "whole blocks", "group"}
    assert {x["dtype"] for x in results} == {"bf16", "fp32"}


@pytest.mark.slow
def test_four_elements_share_the_hash_of_dropout(results):
    """Without sharing, each element takes one stir, and dk, dv another half for the query."""
    measured = [x for x in results if x["variant"] == "dropout"]
    assert {x["kernel"] for x in measured} == set(TABLES)
    for result in measured:
        tiles = result["tiles"]
        keys = tiles["block_n"] + (tiles["block_n_masked"] or tiles["block_n"])  # of both loops
        elements_of_a_thread = tiles["block_m"] * keys / (32 * tiles["num_warps"])
        limit = 1.25 if result["kernel"] == "dkdv" else 0.5
        assert 0 < result["stirs"] < limit * elements_of_a_thread, result


def shared_memory(table, capability, **_):
    """Bytes per program: 99 KiB on the smallest Ampere and Ada GPUs, 227 KiB from the H100 on."""
    return 1024 * (99 if table == "portable" and capability == 80 else 227)


def spilled(kernel, table, block_d, variant, **_):
    """Bytes of stack allowed per thread: the fastest tiles measured on an H100 spill some.

    Registers are scarce with two accumulators (dk and dv) or a wide one, with the hashes of
    dropout, and if more programs share them.
    """
    scarce = block_d >= 128 or variant == "dropout" or table == "hopper, short"
    if kernel == "dkdv" or (kernel == "fwd" and scarce):
        return 256
    return 48


def matrix_instruction(capability, dtype, precision, **_):
    """Matrix instruction to expect: on Hopper the fast one takes tiles that 4 warps can share."""
    if dtype == "fp32":
        # no matrix unit multiplies IEEE fp32
        return "fma" if precision == "ieee" else "mma"
    return {80: "mma", 90: "wgmma", 100: "tcgen05"}[capability]


@pytest.mark.slow
def test_kernels_of_a_step_fit_every_gpu_and_hardly_spill(printed_by):
    measured = printed_by("tests/kernels/fused/triton/compile_kernels.py")
    assert {x["capability"] for x in measured} == {80, 90, 100}
    assert {x["dtype"] for x in measured} == {"bf16", "fp32"}
    for result in measured:
        # Blackwell, where nothing was measured, spills up to four registers
        assert result["stack"] <= (16 if result["capability"] == 100 else 0), result
        assert result["shared"] <= 1024 * 99, result
