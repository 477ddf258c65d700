"""Every tile choice compiles for the GPUs that it is meant for: this needs no GPU."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

# Bytes of shared memory that one program may have: the smallest Ampere and Ada GPUs; the H100.
SHARED_MEMORY = {"portable": 99 * 1024, "hopper": 227 * 1024}

# Bytes a thread. The fastest tile measured for dk and dv on an H100 spills a few registers.
SPILLED = 128


@pytest.mark.slow
def test_few_spills_and_fits_shared_memory():
    done = subprocess.run(
        [sys.executable, "tests/kernels/compile_kernels.py"],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": "."},
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert len(results) == 24 + 6
    for result in results:
        assert result["stack"] <= SPILLED, f"{result['kernel']} spills {result['stack']} bytes"
        assert result["shared"] <= SHARED_MEMORY[result["gpu"]], result
        # On Hopper the fast matrix instruction takes tiles that a group of 4 warps can share.
        assert result["wgmma"] == (result["gpu"] == "hopper"), result
