import json
from dataclasses import replace
from functools import partial

import pytest
import torch

from experiments.attention import __main__ as benchmark_attention
from experiments.attention import hbm_bytes
from experiments.attention.cases import Case, Sparsity

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


def test_ncu_output_is_summed_over_kernels():
    read = round(1400.5e6 + 2e9)
    summed = {"read_bytes": read, "written_bytes": 1628, "kernels": 2}
    assert hbm_bytes.parse_ncu(NCU_CSV) == summed
    assert hbm_bytes.parse_ncu("==PROF== nothing\n") == {}
    half = "\n".join(line for line in NCU_CSV.splitlines() if "write.sum" not in line)
    for text, message in (
        (NCU_CSV.replace('"128"', '"n/a"'), "'n/a' 'byte'"),
        (NCU_CSV.replace("Gbyte", "furlong"), "'2' 'furlong'"),
        (half, "must be all of"),
    ):
        with pytest.raises(ValueError, match=message):
            hbm_bytes.parse_ncu(text)


@pytest.fixture
def fake_ncu(tmp_path, monkeypatch):
    """Put a fake `ncu` on the PATH, with an output and an exit status; it records its arguments."""

    def install(text, code):
        (tmp_path / "text").write_text(text)
        program = tmp_path / "ncu"
        program.write_text(
            f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\ncat {tmp_path}/text\nexit {code}\n'
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return install


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
