"""Shipped Hopper kernels compile to the intended code: this needs no GPU."""

import pytest

triton = pytest.importorskip("triton")
PROGRAM = "tests/kernels/hopper/compile_kernels.py"
# From Triton 3.7 on, a few more registers are spilled outside of loops.
LATER = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7)


def test_one_configuration_of_each_pass_compiles_as_intended(printed_by):
    for result in printed_by(PROGRAM, "1"):
        assert_as_intended(result)


@pytest.mark.slow
def test_every_shipped_configuration_compiles_as_intended(printed_by):
    results = printed_by(PROGRAM)
    for result in results:
        assert_as_intended(result)

    compiled = {
        (x["block_d"], x["groups"], "causal" in x["features"], x["cut"])
        for x in results
        if x["kernel"] == "fwd" and x["dtype"] == "bf16" and set(x["features"]) <= {"causal"}
    }
    causal = {(64, 2, True, 2), (64, 3, True, 1), (64, 4, True, 1)}
    full = {(64, 2, False, 1), (64, 3, False, 0), (64, 4, False, 0)}
    wide = {(128, 2, True, 1), (128, 2, True, 2), (128, 2, False, 0), (128, 2, False, 1)}
    widest = {(256, *plan) for _, *plan in wide}
    assert compiled == causal | full | wide | widest
    assert {x["dtype"] for x in results} == {"bf16", "fp16"}


def assert_as_intended(result):
    assert result["triton"] == triton.__version__  # the limits depend on it
    count = result["instructions"]
    if result["kernel"] == "bwd_preprocess":
        # four 16-byte loads of out and four of dout at 64 columns, twice as many at 128
        assert count["LDG.E.128"] == result["block_d"] // 8, result
        assert result["stack"] == 0, result
        return
    if result["kernel"] == "bwd_document_bounds":
        assert result["stack"] == 0, result
        return
    if result["kernel"] == "bwd_split_reduce":
        assert result["instructions"]["LDG.E.128"] > 0 and result["stack"] == 0, result
        return
    # no wgmma that waits for the one before it (C7510 to C7514), no setmaxnreg ignored (C7508)
    assert result["notes"] == [], result
    for instruction in (
        "HGMMA",  # wgmma
        "UTMALDG",  # the copy engine loads
        "UTMASTG",  # the copy engine stores
        "USETMAXREG",  # the producer gives its registers to the consumers
        "MUFU",  # 2^x by the special function unit
    ):
        assert count[instruction] > 0, (instruction, result)
    # 16-bit probabilities are packed in pairs as they are rounded: no bytes are permuted later
    assert count["PRMT"] < 16, result
    assert result["reused_barriers"] == [], result
    assert result["shared"] <= 227 * 1024, result
    assert result["stack"] > 0 or count["STL"] == count["LDL"] == 0, result
    {"fwd": assert_forward, "bwd": assert_backward}[result["kernel"]](result)


def assert_backward(result):
    # the parameters that `BackwardLaunch` packs
    side_tensors = {"documents": 3, "lengths": 1, "dropout": 1, "alibi": 1, "mask_block_size": 3}
    pointers = 3 + sum(side_tensors.get(name, 0) for name in result["features"])
    assert result["parameters"] == 8 * "128s" + pointers * "q" + "iiiii" + "ffff" + "iiiiii", result
    # dq is added 16 bytes at a time. At 128 columns, each of two groups adds in the loop and after
    # it, and a single group adds in two parts.
    wide = result["block_d"] == 128
    additions = (4 if result["two_groups"] else 2) if wide else 1
    assert result["instructions"]["REDG.E.ADD.F32x4"] == 8 * additions, result
    # sums of earlier programs are read after an acquire
    assert result["acquires"] == result["relaxed"] == 1, result
    # no thread discards what another thread still has to read
    assert result["before_discards"] == ["bar.sync"] * additions, result
    # spilled bytes, nearly all between two key tiles
    dense = set(result["features"]) <= {"causal"}
    everything = len(result["features"]) > 4
    assert result["stack"] <= (96 if dense else 464 if everything and LATER else 320), result


def assert_forward(result):
    # the parameters that `ForwardLaunch` packs
    listed = "mask_block_size" in result["features"]
    names = {"documents", "lengths", "sinks", "alibi", "dropout"}
    side_tensors = names & set(result["features"])
    maps, pointers = 4 * "128s", (2 + len(side_tensors) + 2 * listed) * "q"
    assert result["parameters"] == maps + pointers + "iiiii" + "fff" + "iiiiii", result
    # pingpong uses three named barriers that Triton does not use
    pingpong = {(8 + group, 256) for group in range(3)} if result["pingpong"] else set()
    barriers = set(map(tuple, result["barriers"]))
    assert pingpong <= barriers, result
    assert all(number < 8 for number, *_ in barriers - pingpong), result
    assert result["stack"] <= spilled(**result), result


def spilled(block_d, features, **_):
    """Bytes of stack allowed per thread.

    At 256 columns the output takes half of the registers, and a few are spilled between row tiles.
    """
    everything = len(features) > 4
    if block_d == 256:
        few, many = (56, 88) if LATER else (24, 48)
        return many if everything else few
    if "dropout" in features and "mask_block_size" in features:
        return 40 if LATER else 8 * everything
    return 0


@pytest.mark.slow
def test_gemms_with_a_gelu_compile_as_intended(printed_by):
    results = printed_by("tests/kernels/hopper/gemm/compile_gemms.py")
    assert [(x["gradient"], x["stores_g"]) for x in results] == [
        *((False, True), *2 * ((True, False), (True, True)), (False, True))
    ]
    for result in results:
        # as for attention: no needless waits, and all roles get the registers they request
        assert result["notes"] == [], result
        assert all(count > 0 for count in result["instructions"].values()), result
        assert result["reused_barriers"] == [], result
        assert result["shared"] <= 227 * 1024, result
        # maps of the factors, of h and of the stored outputs; bias, and sums of its gradient; sizes
        maps = 2 + 1 + result["gradient"] + result["stores_g"]
        pointers = result["bias"] * (1 + result["gradient"])
        assert result["parameters"] == maps * "128s" + pointers * "q" + "iiii", result
        # spilled bytes are used only at the end of a tile
        both = result["gradient"] and result["stores_g"]
        assert result["stack"] <= ((144 if LATER else 64) if both else 0), result
