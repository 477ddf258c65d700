import json
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch

from experiments.attention import __main__ as benchmark_attention
from experiments.attention import hbm_bytes
from experiments.attention.cases import Case, Sparsity, make_tensors
from experiments.attention.peers import CONTENDERS, standard

CPU = torch.device("cpu")
SMALL = Case(batch=2, seq_len=48, n_head=2, head_dim=16, dtype=torch.float16)

NCU_CSV = """\
==PROF== Connected to process 42
==PROF== Profiling "kernel_a" - 0: 0%....50%....100% - 1 pass
"ID","Process ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"
"0","42","kernel_a(int, float)","Metrics","dram__bytes_read.sum","Mbyte","1,400.5"
"0","42","kernel_a(int, float)","Metrics","dram__bytes_write.sum","byte","128"
"1","42","kernel_b","Metrics","dram__bytes_read.sum","Gbyte","2"
"1","42","kernel_b","Metrics","dram__bytes_write.sum","Kbyte","1.5"
"""


def test_standard_attention_is_counted_operation_by_operation():
    case = hbm_bytes.CASES["standard"]
    x = 64 * 1024 * 16 * 64 * 2
    matrix = 64 * 16 * 1024**2 * 2
    counted = hbm_bytes.standard_bytes(case)
    # q k^T writes the matrix, softmax reads and writes it, and p v reads it; the scale of q and
    # the copies that bmm needs of q, k and v move 8 of the 12 x.
    assert counted["forward"] == 4 * matrix + 12 * x
    # dp is written, softmax reads p and dp and writes ds, and dv, dq and dk read p, ds and ds.
    assert counted["backward"] == 7 * matrix + 12 * x


def test_our_bytes_are_counted_by_tiles():
    case = Case(2, 1000, 3, 64, torch.float16)
    x, rows = 2 * 1000 * 3 * 64 * 2, 2 * 3 * 1000 * 4
    count = partial(hbm_bytes.flash_bytes, block_m_fwd=128, block_m_dq=64, block_n_dkdv=256)
    moved = count(case)
    assert moved["forward"] == {"loaded": 2 * x + rows + 16 * x, "minimum": 4 * x + rows}
    assert moved["backward"] == {
        "loaded": 8 * x + 3 * rows + 2 * x * 16 + (2 * x + 2 * rows) * 4,
        "minimum": 12 * x + 5 * rows,
    }
    sparse = replace(hbm_bytes.CASES["ours"], sparsity=Sparsity("butterfly", 1))
    quarter, dense = count(sparse)["forward"], count(hbm_bytes.CASES["ours"])["forward"]
    assert quarter["minimum"] == dense["minimum"]
    x = 64 * 1024 * 16 * 64 * 2
    assert dense["loaded"] - quarter["loaded"] == 2 * x * 8 * 0.75


@pytest.mark.parametrize("name", ["ours", "ours, butterfly"])
def test_tiles_are_those_of_the_kernels(name):
    tiles = hbm_bytes.our_tiles(hbm_bytes.CASES[name], "cpu")
    assert set(tiles) == {"block_m_fwd", "block_m_dq", "block_n_dkdv"}
    assert set(tiles.values()) <= {16, 32, 64, 128, 256}


def test_ncu_output_is_summed_over_kernels():
    read = round(1400.5e6 + 2e9)
    summed = {"read_bytes": read, "written_bytes": 1628, "kernels": 2}
    assert hbm_bytes.parse_ncu(NCU_CSV) == summed
    assert hbm_bytes.parse_ncu("==PROF== nothing\n") == {}
    with pytest.raises(ValueError, match="'n/a' 'byte'"):
        hbm_bytes.parse_ncu(NCU_CSV.replace('"128"', '"n/a"'))
    with pytest.raises(ValueError, match="'2' 'furlong'"):
        hbm_bytes.parse_ncu(NCU_CSV.replace("Gbyte", "furlong"))
    half = "\n".join(line for line in NCU_CSV.splitlines() if "write.sum" not in line)
    with pytest.raises(ValueError, match="not all of"):
        hbm_bytes.parse_ncu(half)


@pytest.fixture
def fake_ncu(tmp_path, monkeypatch):
    """Put a program `ncu` on the PATH that prints and exits as told, and records its arguments."""

    def install(text, code):
        (tmp_path / "text").write_text(text)
        program = tmp_path / "ncu"
        program.write_text(
            f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\ncat {tmp_path}/text\nexit {code}\n'
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return install


def test_profile_runs_ncu(fake_ncu, tmp_path, monkeypatch):
    fake_ncu(NCU_CSV, 0)
    assert hbm_bytes.profile("ours/forward")["kernels"] == 2
    arguments = (tmp_path / "arguments").read_text()
    assert "--clock-control none --profile-from-start off --metrics dram__bytes_read" in arguments
    assert arguments.strip().endswith("-m experiments.attention --preset io --one-run ours/forward")
    fake_ncu("==PROF== Connected\n==ERROR== ERR_NVGPUCTRPERM: no permission\nbye\n", 1)
    assert hbm_bytes.profile("ours/forward") == {
        "profiler": "ncu failed (1): ==ERROR== ERR_NVGPUCTRPERM: no permission"
    }
    fake_ncu("", 3)
    assert hbm_bytes.profile("ours/forward") == {"profiler": "ncu failed (3): "}
    fake_ncu("==WARNING== No kernels were profiled.\n", 0)
    assert hbm_bytes.profile("ours/forward") == {"profiler": "ncu saw no kernel"}
    monkeypatch.setenv("PATH", "")
    assert "no ncu" in hbm_bytes.profile("ours/forward")["profiler"]


@pytest.mark.parametrize("works", [True, False])
def test_io_preset(works, fake_ncu, made_up, tmp_path, capsys):
    fake_ncu(NCU_CSV if works else "==ERROR== no counters\n", 0 if works else 1)
    out = tmp_path / "io.json"
    benchmark_attention.main(["--preset", "io", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [row["name"] for row in rows] == ["standard", "ours", "ours, butterfly"]
    for row in rows:
        for part in ("forward", "backward"):
            moved = row["bytes"][part]
            assert moved["loaded"] >= moved["minimum"] > 0
            assert ("read_bytes" in moved) == works
    assert ("==ERROR== no counters" in capsys.readouterr().out) != works
    assert out.with_suffix(".png").stat().st_size > 1000


def test_the_profiler_sees_the_second_run(monkeypatch):
    seen = []

    @contextmanager
    def profile():
        seen.append("start")
        yield
        seen.append("stop")

    right = standard(SMALL, CPU)
    monkeypatch.setitem(
        CONTENDERS,
        "standard",
        lambda case, device: lambda q, k, v: seen.append("forward") or right(q, k, v),
    )
    monkeypatch.setitem(hbm_bytes.CASES, "standard", SMALL)
    monkeypatch.setattr(hbm_bytes, "make_tensors", partial(hbm_bytes.make_tensors, device=CPU))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda.profiler, "profile", profile)
    benchmark_attention.main(["--preset", "io", "--one-run", "standard/forward"])
    assert seen == ["forward", "start", "forward", "stop"]
    seen.clear()
    hbm_bytes.one_run("standard/backward")
    assert seen == ["forward", "start", "stop"]


def test_parts_of_a_run_are_the_forward_and_the_backward():
    tensors = make_tensors(SMALL, CPU)
    forward = hbm_bytes.part_of_a_run("standard", SMALL, tensors, "forward")
    backward = hbm_bytes.part_of_a_run("standard", SMALL, tensors, "backward")
    assert forward().shape == (2, 48, 2, 16)
    assert len(backward()) == len(backward()) == 3
