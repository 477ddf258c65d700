import itertools
import math
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch.nn.attention import SDPBackend

from experiments.attention import measure, peers
from experiments.attention.cases import Case, Sparsity, make_tensors
from experiments.attention.check import RESULTS, answer, errors
from experiments.attention.measure import measure_case, repeats
from experiments.attention.peers import (
    CONTENDERS,
    UnsupportedError,
    load_tutorial,
    sdpa,
    triton_tutorial,
)
from kernels.mask.patterns import butterfly

CPU = torch.device("cpu")
SMALL = Case(batch=2, seq_len=48, n_head=2, head_dim=16, dtype=torch.float16)


@pytest.fixture
def measured(monkeypatch):
    """Rows of contenders on the CPU, where there is no GPU to time."""
    monkeypatch.setattr(
        measure,
        "gpu_ms",
        lambda run, timed_ms=0.0: run() is not None and {"ms": 2.0, "ms_20": 1.5, "ms_80": 3.0},
    )
    monkeypatch.setattr(measure, "eager_ms", lambda run: run() is not None and 5.0)
    monkeypatch.setattr(measure, "peak_mib", lambda run: run() is not None and 7.0)
    return lambda names, case=SMALL: measure_case(case, names, device="cpu")


def contender(monkeypatch, name, attention):
    monkeypatch.setitem(peers.CONTENDERS, name, lambda case, device: attention)


@pytest.mark.parametrize("value", [1.05, math.nan, math.inf])
def test_a_wrong_result_has_no_speed(value, measured, monkeypatch, capsys):
    right = sdpa(SDPBackend.MATH, SMALL, CPU)
    contender(monkeypatch, "ours", lambda q, k, v: right(q, k, v) * value)
    (row,) = measured(["ours"])
    assert row["status"].startswith("wrong: error")
    assert not [key for key in row if key.endswith(("_ms", "_tflops", "_mib"))]
    assert " ms" not in capsys.readouterr().out


def test_one_wrong_gradient_of_the_last_head_is_seen(measured, monkeypatch):
    right = sdpa(SDPBackend.MATH, SMALL, CPU)

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, k):
            return k.clone()

        @staticmethod
        def backward(ctx, *grads):
            dk = grads[0].clone()
            dk[-1, 20, -1] = math.nan
            return dk

    contender(monkeypatch, "ours", lambda q, k, v: right(q, Broken.apply(k), v))
    (row,) = measured(["ours"])
    assert row["status"].startswith("wrong: error nan of dk (allowed ")
    assert ", " not in row["status"]


def test_a_contender_that_cannot_run_says_why_and_the_others_continue(
    measured, monkeypatch, capsys
):
    def exhausted(q, k, v):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    contender(monkeypatch, "standard", exhausted)
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # as if it were not installed
    names = ["standard", "SDPA cuDNN", "flash-attn-4", "SDPA math"]
    status = {row["name"]: row["status"] for row in measured(names)}
    assert status["standard"] == "out of memory"
    assert status["SDPA cuDNN"] == "not supported: PyTorch has no kernel for this case"
    assert status["flash-attn-4"].startswith("not supported: cannot be imported (")
    assert status["SDPA math"] == "ok"
    assert "out of memory" in capsys.readouterr().out


def test_rounds_time_each_contender_in_turn_and_keep_the_median(measured, monkeypatch):
    """The clock grows from call to call, so times tell the order."""
    asked = []
    right = sdpa(SDPBackend.MATH, SMALL, CPU)

    def attend(name, q, k, v):
        asked.append(name)
        return right(q, k, v)

    for name in ("ours", "SDPA math"):
        contender(monkeypatch, name, partial(attend, name))
    clock = itertools.count(1)
    times = {"ms_20": 0.0, "ms_80": 0.0}
    monkeypatch.setattr(
        measure,
        "gpu_ms",
        lambda run, timed_ms=0.0: run() is not None and {"ms": float(next(clock)), **times},
    )
    ours, peer = measure_case(SMALL, ["ours", "SDPA math"], device="cpu", rounds=3)
    first = ours["forward_round_ms"][0]
    order = ours["forward_round_ms"], ours["backward_round_ms"]
    assert order == ([first, first + 4, first + 8], [first + 1, first + 5, first + 9])
    assert peer["forward_round_ms"] == [first + 2, first + 6, first + 10]
    assert asked[-6:] == ["ours", "SDPA math"] * 3
    assert ours["forward_ms"] == first + 4
    flops = SMALL.forward_flops
    assert ours["backward_tflops"] == pytest.approx(2.5 * flops / (first + 5) / 1e9)


def test_rounds_leave_out_wrong_results(measured, monkeypatch):
    right = sdpa(SDPBackend.MATH, SMALL, CPU)
    contender(monkeypatch, "ours", lambda q, k, v: right(q, k, v) * 1.05)
    rows = measure_case(SMALL, ["ours", "SDPA math"], device="cpu", rounds=2)
    assert ["forward_round_ms" in row for row in rows] == [False, True]


@pytest.mark.parametrize("causal", [False, True])
def test_flash_attn_4_receives_the_blocks(causal, measured, monkeypatch):
    """A stand-in for the package computes what the lists say that it is given."""
    given = []

    class Lists(NamedTuple):
        mask_block_cnt: torch.Tensor
        mask_block_idx: torch.Tensor
        full_block_cnt: torch.Tensor
        full_block_idx: torch.Tensor
        block_size: tuple[int, int]

        def layouts(self):
            """Partial and full blocks, (rows, columns) each."""
            for counts, blocks in (self[:2], self[2:4]):
                found = torch.zeros(4, 4, dtype=torch.bool)
                for row, count in enumerate(counts[0, 0].tolist()):
                    found[row, blocks[0, 0, row, :count].long()] = True
                yield found

    def flash_attn_func(
        q, k, v, *, softmax_scale, deterministic, block_sparse_tensors, block_sparse_tensors_bwd,
        mask_mod=None,
    ):  # fmt: skip
        given.append((block_sparse_tensors, block_sparse_tensors_bwd))
        layouts = block_sparse_tensors.layouts()
        partial, full = (torch.kron(layout, torch.ones(16, 16)) > 0 for layout in layouts)
        at = torch.arange(64)
        seen = full
        if mask_mod is not None:
            seen = full | partial & mask_mod(None, None, at[:, None], at, None, None)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        options = {"attn_mask": seen, "scale": softmax_scale}
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)
        return out.transpose(1, 2), None

    lists = SimpleNamespace(BlockSparseTensorsTorch=Lists)
    module = SimpleNamespace(flash_attn_func=flash_attn_func, block_sparsity=lists)
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(cute=module))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    cute = SimpleNamespace(jit=lambda function: function)
    monkeypatch.setitem(sys.modules, "cutlass", SimpleNamespace(cute=cute))
    case = replace(SMALL, seq_len=64, sparsity=Sparsity("butterfly", 1, 16), causal=causal)
    (row,) = measured(["flash-attn-4"], case)
    assert row["status"] == "ok"
    by_row, by_column = given[0]
    assert by_row.block_size == by_column.block_size == (16, 16)
    partial, full = by_row.layouts()
    layout = butterfly(4, n_factors=1)
    assert torch.equal(partial | full, layout.tril() if causal else layout)
    assert torch.equal(partial, torch.eye(4, dtype=torch.bool) & causal)
    partial_by_column, full_by_column = by_column.layouts()
    assert torch.equal(partial_by_column, partial.T) and torch.equal(full_by_column, full.T)


def test_other_errors_are_not_caught(measured, monkeypatch):
    def broken(q, k, v, **options):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    contender(monkeypatch, "ours", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        measured(["ours"])
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        measured(["SDPA math"])


def test_a_peer_that_refuses_a_case_says_why(measured, monkeypatch):
    def refusing(q, k, v):
        raise AssertionError("deterministic backward not supported with block sparsity")

    contender(monkeypatch, "flash-attn-4, deterministic", refusing)
    (row,) = measured(["flash-attn-4, deterministic"])
    assert row["status"] == (
        "not supported: deterministic backward not supported with block sparsity"
    )
    contender(monkeypatch, "ours", refusing)
    with pytest.raises(AssertionError, match="block sparsity"):
        measured(["ours"])


def test_repeated_runs_are_compared_bit_by_bit(monkeypatch):
    tensors = make_tensors(SMALL, CPU)
    right = CONTENDERS["SDPA math"](SMALL, CPU)
    assert repeats(right, tensors, 3)
    calls = iter(range(3))

    def drifting(q, k, v):
        return right(q, k, v) * (1 + (next(calls) == 2) * 2**-6)

    assert not repeats(drifting, tensors, 3)


def test_pytorch_is_deterministic_only_for_the_peers_that_ask_for_it(measured, monkeypatch):
    asked = {}
    for name in ("SDPA flash", "SDPA flash, deterministic"):

        def attend(q, k, v, name=name):
            asked[name] = torch.are_deterministic_algorithms_enabled()
            return CONTENDERS["SDPA math"](SMALL, CPU)(q, k, v)

        contender(monkeypatch, name, attend)
    measured(["SDPA flash, deterministic", "SDPA flash"])
    assert asked == {"SDPA flash, deterministic": True, "SDPA flash": False}


def test_speeds_follow_the_flop_convention(measured):
    (row,) = measured(["SDPA math"], replace(SMALL, causal=True))
    flops = 4 * 2 * 2 * 48**2 * 16 / 2
    assert row["forward_tflops"] == pytest.approx(flops / 2e-3 / 1e12)
    assert row["backward_tflops"] == pytest.approx(2.5 * flops / 2e-3 / 1e12)
    assert row["both_eager_ms"] == 5.0
    assert (row["backward_ms_20"], row["backward_ms_80"], row["peak_mib"]) == (1.5, 3.0, 7.0)


def test_flops_count_causal_and_density():
    case = Case(2, 1024, 4, 64)
    full = 4 * 2 * 4 * 1024**2 * 64
    assert case.forward_flops == full
    assert replace(case, causal=True).forward_flops == full / 2
    # 8 blocks of 128, each with itself and one partner
    sparse = replace(case, sparsity=Sparsity("butterfly", 1))
    assert sparse.density == 0.25
    assert sparse.forward_flops == full / 4
    window = replace(case, sparsity=Sparsity("window", 2), causal=True)
    assert 0 < window.forward_flops == full / 2 * window.density < full / 2


BUTTERFLY = Sparsity("butterfly", 1, 16)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["standard", "SDPA math", "SDPA flash"])
def test_peers_are_right(name, padded):
    case = replace(SMALL, padded=padded)
    tensors = make_tensors(case, CPU)
    expected = answer(case, tensors)
    found = errors(CONTENDERS[name](case, CPU), tensors, expected)
    assert all(0 < found[x] < expected.budgets[x] < 0.01 for x in RESULTS)


@pytest.mark.parametrize(
    "option",
    [{"sparsity": BUTTERFLY}, {"dropout_p": 0.1}, {"padded": True}, {"seq_len": 192}],
    ids=str,
)
def test_the_tutorial_lacks(option):
    case = replace(Case(1, 256, 1, 16), **option)
    with pytest.raises(UnsupportedError, match="the tutorial (has no|takes multiples of 128)"):
        triton_tutorial(SimpleNamespace(), case, CPU)


def test_a_file_that_is_not_the_tutorial(tmp_path):
    advice = "use Triton's 06-fused-attention.py"
    for path in (tmp_path, tmp_path / "missing.py"):
        with pytest.raises(FileNotFoundError, match=f"--tutorial={path} is not a file: {advice}"):
            load_tutorial(path)
    (tmp_path / "text.md").write_text("attention = _attn_fwd = None")
    with pytest.raises(ValueError, match=f"text.md is not a Python file: {advice}"):
        load_tutorial(tmp_path / "text.md")
    (tmp_path / "other.py").write_text("attention = None")
    with pytest.raises(ValueError, match=f"other.py has no attention or no _attn_fwd: {advice}"):
        load_tutorial(tmp_path / "other.py")
