"""Every tile choice compiles for the GPUs it is meant for, without spilling: no GPU needed."""

import re
import subprocess
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from kernels import triton_bwd, triton_fwd, tuning  # noqa: E402

KERNELS = {
    "fwd": (triton_fwd._attn_fwd_kernel, tuning._FORWARD),
    "dkdv": (triton_bwd._attn_bwd_dkdv_kernel, tuning._BACKWARD_DKDV),
    "dq": (triton_bwd._attn_bwd_dq_kernel, tuning._BACKWARD_DQ),
}


def compile_kernel(name, block_d, tiles, capability, *, causal=True, dropout=False, dtype="bf16"):
    kernel, _ = KERNELS[name]
    block_m, block_n, num_warps, num_stages = tiles
    constants = {
        "GROUP": 1,
        "HEAD_DIM": block_d,
        "BLOCK_D": block_d,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "IS_CAUSAL": causal,
        "HAS_DROPOUT": dropout,
        "PRECISION": "tf32",
    }
    signature, attributes = {}, {}
    for i, arg in enumerate(kernel.arg_names):
        if arg in constants:
            signature[arg] = "constexpr"
        elif arg == "seed_ptr":
            signature[arg] = "*i64"
        elif arg.endswith("_ptr"):
            signature[arg] = "*fp32" if arg.startswith(("lse", "delta")) else f"*{dtype}"
        elif "scale" in arg:
            signature[arg] = "fp32"
        else:
            signature[arg] = "i32"
        # what a launch on ordinary tensors would find: aligned pointers, strides that are
        # multiples of 16
        if arg.endswith("_ptr") or arg.startswith("stride"):
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(
        kernel,
        signature,
        {(kernel.arg_names.index(a),): v for a, v in constants.items()},
        attributes,
    )
    return triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": num_warps, "num_stages": num_stages},
    )


def resources(compiled, tmp_path):
    """Registers and stack bytes a thread, from the compiled binary."""
    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    text = subprocess.run(
        [cuobjdump, "-res-usage", cubin], check=True, capture_output=True, text=True
    ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2])
