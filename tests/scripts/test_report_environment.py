import os
import platform
import subprocess
import sys
from pathlib import Path

import torch

from kernels.attention import IMPLS
from scripts import report_environment

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_TRITON = """
import runpy, sys
sys.modules["triton"] = None
runpy.run_module("scripts.report_environment", run_name="__main__", alter_sys=True)
"""


def test_needs_neither_triton_nor_a_gpu():
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", WITHOUT_TRITON]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    facts = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert facts["Python"].startswith(platform.python_version())
    assert facts["torch"].startswith(torch.__version__)
    assert facts["attention"].startswith("sdpa, ")
    assert facts["triton"] == "not supported: the package triton is not installed"
    assert facts["hopper"].startswith("not supported: q.device=cpu")


def test_every_implementation_says_whether_it_serves_the_call():
    lines = dict(report_environment.report())
    assert [name for name in lines if name.startswith("  ")] == [f"  {name}" for name in IMPLS]
    assert lines[f"  {lines['attention'].partition(',')[0]}"] == "supported"


def test_a_missing_package_is_reported(monkeypatch):
    monkeypatch.setattr(report_environment, "PACKAGES", ("no-such-package",))
    assert ("no-such-package", "not installed") in report_environment.report()


def test_the_driver_is_what_nvidia_smi_prints(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert report_environment.nvidia_driver() is None
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 580.95.05\necho 580.95.05\n")
    program.chmod(0o755)
    assert report_environment.nvidia_driver() == "580.95.05"
    program.write_text("#!/bin/sh\necho 'could not communicate with the driver'\nexit 9\n")
    assert report_environment.nvidia_driver() is None
