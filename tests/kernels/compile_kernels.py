"""Compile every tile choice for sm_80 and sm_90 and print what each needs, as JSON.

A program of its own, because test_compile.py runs where Triton interprets kernels.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import triton_bwd, triton_fwd, tuning

KERNELS = {
    "fwd": (triton_fwd._attn_fwd_kernel, tuning._FORWARD),
    "dkdv": (triton_bwd._attn_bwd_dkdv_kernel, tuning._BACKWARD_DKDV),
    "dq": (triton_bwd._attn_bwd_dq_kernel, tuning._BACKWARD_DQ),
}
CAPABILITY = {"hopper": 90, "portable": 80}


def compile_kernel(name, block_d, tiles, capability, dropout):
    """A causal bf16 kernel on ordinary tensors: aligned, strides that are multiples of 16."""
    kernel, _ = KERNELS[name]
    block_m, block_n, num_warps, num_stages = tiles
    constants = {
        "GROUP": 1,
        "HEAD_DIM": block_d,
        "BLOCK_D": block_d,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "IS_CAUSAL": True,
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
            signature[arg] = "*fp32" if arg.startswith(("lse", "delta")) else "*bf16"
        elif "scale" in arg:
            signature[arg] = "fp32"
        else:
            signature[arg] = "i32"
        if arg.endswith("_ptr") or arg.startswith("stride"):
            attributes[(i,)] = [["tt.divisibility", 16]]
    positions = {(kernel.arg_names.index(arg),): value for arg, value in constants.items()}
    return triton.compile(
        ASTSource(kernel, signature, positions, attributes),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True},
    )


def registers_and_stack(cubin):
    """Registers, and bytes of stack, of a thread; a stack means that registers were spilled."""
    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [cuobjdump, "-res-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2])


def main():
    results = []
    for name, (_, tables) in KERNELS.items():
        for gpu, table in tables.items():
            for block_d, tiles in table.items():
                # Dropout needs registers too; where it must not spill is where speed is measured.
                for dropout in (False, True) if gpu == "hopper" and block_d >= 64 else (False,):
                    compiled = compile_kernel(name, block_d, tiles, CAPABILITY[gpu], dropout)
                    registers, stack = registers_and_stack(compiled.asm["cubin"])
                    results.append(
                        {
                            "kernel": f"{name} {gpu} D{block_d}{' dropout' if dropout else ''}",
                            "gpu": gpu,
                            "registers": registers,
                            "stack": stack,
                            "shared": compiled.metadata.shared,
                            "wgmma": "wgmma" in compiled.asm["ptx"],
                        }
                    )
    sys.stdout.write(json.dumps(results))


if __name__ == "__main__":
    main()
