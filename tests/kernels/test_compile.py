"""Every tile choice compiles for the GPUs that it is meant for: this needs no GPU."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

# Bytes of shared memory that one program may have: the smallest Ampere and Ada GPUs; the H100.
SHARED_MEMORY = {"portable": 99 * 1024, "hopper": 227 * 1024}

# Bytes a thread. The fastest tile measured for dk and dv on an H100 spills a few registers, and
# more of them where a loop over the query heads of a group goes around it.
SPILLED = 128
SPILLED_IN_A_GROUP = 640


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
    assert len(results) == 24 + 6 + 3 + 12
    for result in results:
        spilled = SPILLED if result["group"] == 1 else SPILLED_IN_A_GROUP
        assert result["stack"] <= spilled, result
        assert result["shared"] <= SHARED_MEMORY[result["gpu"]], result
        assert result["instruction"] == expected_instruction(**result), result


def expected_instruction(gpu, dtype, precision, **_):
    """The matrix instruction: on Hopper the fast one takes tiles that 4 warps can share."""
    if dtype == "fp32":
        # no matrix unit multiplies IEEE fp32
        return "fma" if precision == "ieee" else "mma"
    return "wgmma" if gpu == "hopper" else "mma"
