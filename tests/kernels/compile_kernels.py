"""Compile the kernels for sm_80 and sm_90 and print what each needs, as JSON.

Every tile choice, and the variants that change what is compiled: dropout, no causal mask, several
query heads a key head, fp32. A program of its own, because test_compile.py runs where Triton
interprets kernels.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import triton_bwd, triton_fwd, tuning

KERNELS = {
    "fwd": (triton_fwd._attn_fwd_kernel, tuning._FORWARD),
    "dkdv": (triton_bwd.attn_bwd_dkdv_kernel, tuning._BACKWARD_DKDV),
    "dq": (triton_bwd.attn_bwd_dq_kernel, tuning._BACKWARD_DQ),
}
CAPABILITY = {"hopper": 90, "portable": 80}


@dataclass(frozen=True)
class Case:
    """One compilation of a kernel: `KERNELS`, `CAPABILITY` and `tuning` name the choices."""

    kernel: str
    gpu: str
    block_d: int
    dtype: str = "bf16"
    precision: str = "tf32"
    causal: bool = True
    dropout: bool = False
    group: int = 1

    @property
    def tiles(self) -> tuple[int, int, int, int]:
        if self.dtype == "fp32":
            return tuning._FP32[self.block_d]
        return KERNELS[self.kernel][1][self.gpu][self.block_d]


def cases() -> Iterator[Case]:
    for kernel, (_, tables) in KERNELS.items():
        for gpu, table in tables.items():
            for block_d in table:
                yield Case(kernel, gpu, block_d)
        # What needs registers beside the tiles; where it must not spill is where speed is measured.
        yield Case(kernel, "hopper", 64, dropout=True)
        yield Case(kernel, "hopper", 128, dropout=True)
        yield Case(kernel, "hopper", 64, causal=False, group=4)
        for block_d in tuning._FP32:
            # "ieee" is the default of `torch.set_float32_matmul_precision`, and slow to compile.
            precision = "ieee" if block_d == 64 else "tf32"
            yield Case(kernel, "portable", block_d, dtype="fp32", precision=precision)


def compile_case(case: Case):
    """The kernel on ordinary tensors: aligned, with strides that are multiples of 16."""
    kernel, _ = KERNELS[case.kernel]
    block_m, block_n, num_warps, num_stages = case.tiles
    constants = {
        "GROUP": case.group,
        "HEAD_DIM": case.block_d,
        "BLOCK_D": case.block_d,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "IS_CAUSAL": case.causal,
        "HAS_DROPOUT": case.dropout,
        "PRECISION": case.precision,
    }
    signature, attributes = {}, {}
    for i, arg in enumerate(kernel.arg_names):
        if arg in constants:
            signature[arg] = "constexpr"
        elif arg == "seed_ptr":
            signature[arg] = "*i64"
        elif arg.endswith("_ptr"):
            signature[arg] = "*fp32" if arg.startswith(("lse", "delta")) else f"*{case.dtype}"
        elif "scale" in arg:
            signature[arg] = "fp32"
        else:
            signature[arg] = "i32"
        if arg.endswith("_ptr") or arg.startswith("stride"):
            attributes[(i,)] = [["tt.divisibility", 16]]
    positions = {(kernel.arg_names.index(arg),): value for arg, value in constants.items()}
    return triton.compile(
        ASTSource(kernel, signature, positions, attributes),
        target=GPUTarget("cuda", CAPABILITY[case.gpu], 32),
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


def matrix_instruction(ptx: str) -> str:
    """What multiplies the tiles: Hopper's instruction, Ampere's, or none but scalar ones."""
    if "wgmma.mma_async" in ptx:
        return "wgmma"
    return "mma" if "mma.sync" in ptx else "fma"


def measure(case: Case) -> dict[str, object]:
    compiled = compile_case(case)
    registers, stack = registers_and_stack(compiled.asm["cubin"])
    return asdict(case) | {
        "registers": registers,
        "stack": stack,
        "shared": compiled.metadata.shared,
        "instruction": matrix_instruction(compiled.asm["ptx"]),
    }


def main():
    with ProcessPoolExecutor() as pool:
        sys.stdout.write(json.dumps(list(pool.map(measure, cases()))))


if __name__ == "__main__":
    main()
