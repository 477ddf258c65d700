"""Compile the kernels for sm_80, sm_90 and sm_100 and print the resources of each, as JSON.

Covers every tile choice, and all that changes the compiled code: the features of a call, several
query heads per key head, and fp32. This is a separate program, because test_compile.py runs where
Triton interprets kernels.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.options import Features
from kernels.triton import tiles
from kernels.triton.bwd_dkdv import attn_bwd_dkdv_kernel
from kernels.triton.bwd_dq import attn_bwd_dq_kernel
from kernels.triton.fwd import attn_fwd_kernel
from kernels.triton.primitives import STIR

KERNELS = {
    "fwd": (attn_fwd_kernel, tiles.FORWARD),
    "dkdv": (attn_bwd_dkdv_kernel, tiles.BACKWARD_DKDV),
    "dq": (attn_bwd_dq_kernel, tiles.BACKWARD_DQ),
}
# name of a table -> compute capability of the GPUs that it was made for
CAPABILITY = {"portable": 80, "hopper": 90}
BLACKWELL = 100

# Tile rows of the operands read as tiles; the others are passed as pointer and strides.
TILED = {
    "fwd": {
        "q": "BLOCK_M",
        "out": "BLOCK_M",
        "k": "BLOCK_N",
        "v": "BLOCK_N",
        "k_masked": "BLOCK_N_MASKED",
        "v_masked": "BLOCK_N_MASKED",
    },
    "dkdv": {"q": "BLOCK_M", "dout": "BLOCK_M", "dk": "BLOCK_N", "dv": "BLOCK_N"},
    "dq": {"k": "BLOCK_N", "v": "BLOCK_N", "dq": "BLOCK_M"},
}
OPERANDS = {"q", "k", "v", "k_masked", "v_masked", "out", "dout", "dq", "dk", "dv"}
# Pointers that are None if the call does not use the feature.
OPTIONAL_POINTERS = {
    "seed_ptr": "dropout",
    "doc_ptr": "documents",
    "doc_bounds_ptr": "documents",
    "lengths_ptr": "lengths",
    "sinks_ptr": "sinks",
    "slopes_ptr": "alibi",
    "rows_ptr": "mask_block_size",
    "row_blocks_ptr": "mask_block_size",
    "cols_ptr": "mask_block_size",
    "col_blocks_ptr": "mask_block_size",
}

CAUSAL = Features(causal=True)
VARIANTS = {
    "dropout": Features(causal=True, dropout=True),
    "window and documents": Features(causal=True, window=True, documents=True),
    "alibi": Features(causal=True, alibi=True),
    "padding, cap and sinks": Features(lengths=True, softcap=True, sinks=True),
    "mask": Features(causal=True, mask_block_size=128),
    "whole blocks": Features(mask_block_size=128, masked_loop=False),
    "whole tiles": Features(masked_loop=False),
}
# Tables of the variants that have one of their own: tuning.backward_dkdv_tiles
DKDV_TABLE = {
    "dropout": "hopper, small",
    "mask": "hopper, small",
    "padding, cap and sinks": "hopper, small",
    "whole blocks": "hopper, whole",
}


@dataclass(frozen=True)
class Case:
    """One compilation of a kernel of `KERNELS`, with the tiles of one of its tables."""

    kernel: str
    table: str
    capability: int
    block_d: int
    dtype: str = "bf16"
    precision: str = "tf32"
    features: Features = field(default=CAUSAL)
    group: int = 1
    variant: str = ""

    @property
    def tiles(self) -> tiles.Tiles:
        if self.dtype == "fp32":
            return tiles.FP32[self.block_d]
        return KERNELS[self.kernel][1][self.table][self.block_d]


def cases() -> Iterator[Case]:
    for kernel, (_, tables) in KERNELS.items():
        for name, table in tables.items():
            for block_d in table:
                yield Case(kernel, name, CAPABILITY[name.split(",")[0]], block_d)
        yield Case(kernel, "portable", BLACKWELL, 128)
        for variant, features in VARIANTS.items():
            own = DKDV_TABLE.get(variant, "hopper") if kernel == "dkdv" else "hopper"
            for table in tables.keys() - {"portable"}:
                for block_d in tables[table].keys() & {64, 128}:
                    if kernel == "dkdv" and table != (own if block_d in tables[own] else "hopper"):
                        continue
                    yield Case(kernel, table, 90, block_d, features=features, variant=variant)
        yield Case(kernel, "portable", 80, 64, features=VARIANTS["mask"], variant="mask")
        table = "hopper, small" if kernel == "dkdv" else "hopper"
        yield Case(kernel, table, 90, 64, features=Features(), group=4, variant="group")
        for block_d in tiles.FP32:
            # "ieee" is the default of `torch.set_float32_matmul_precision`, and slow to compile.
            precision = "ieee" if block_d == 64 else "tf32"
            yield Case(kernel, "portable", 80, block_d, dtype="fp32", precision=precision)


def pointer_type(arg: str) -> str:
    types = {"seed_ptr": "*i64", "sinks_ptr": "*fp32", "slopes_ptr": "*fp32"}
    return types.get(arg, "*i32" if arg in OPTIONAL_POINTERS else "*fp32")


def signature_of(case: Case) -> tuple[dict, dict, dict]:
    """Types, constants and alignment of a call on aligned tensors with strides of 16 n."""
    kernel, _ = KERNELS[case.kernel]
    chosen = case.tiles
    constants = {
        "GROUP": case.group,
        "HEAD_DIM": case.block_d,
        "BLOCK_D": case.block_d,
        "BLOCK_M": chosen.block_m,
        "BLOCK_N": chosen.block_n,
        "BLOCK_N_MASKED": chosen.block_n_masked or chosen.block_n,
        "features": case.features,
        "PRECISION": case.precision,
        "HAS_DLSE": False,
    }
    constants = {arg: value for arg, value in constants.items() if arg in kernel.arg_names}
    if "dlse_ptr" in kernel.arg_names:
        constants["dlse_ptr"] = None
    if chosen.block_n_masked == 0 and case.kernel == "fwd":
        constants |= {"k_masked": None, "v_masked": None}
    for arg, feature in OPTIONAL_POINTERS.items():
        if arg in kernel.arg_names and not getattr(case.features, feature):
            constants[arg] = None
    has_tma = case.capability >= 90 and case.dtype != "fp32"
    signature, attributes = {}, {}
    aligned = [["tt.divisibility", 16]]
    for i, arg in enumerate(kernel.arg_names):
        if arg in constants:
            signature[arg] = "constexpr"
        elif arg in OPERANDS and has_tma and arg in TILED[case.kernel]:
            rows = constants[TILED[case.kernel][arg]]
            signature[arg] = f"tensordesc<{case.dtype}[1, 1, {rows}, {case.block_d}]>"
        elif arg in OPERANDS:
            signature[arg] = (f"*{case.dtype}", "i32", "i32", "i32")
            attributes |= {(i, j): aligned for j in range(4)}
        elif arg.endswith("_ptr"):
            signature[arg] = pointer_type(arg)
            attributes[(i,)] = aligned
        else:
            signature[arg] = "fp32" if "scale" in arg else "i32"
            if arg == "padded_q":
                attributes[(i,)] = aligned
    positions = {(kernel.arg_names.index(arg),): value for arg, value in constants.items()}
    return signature, positions, attributes


def compile_case(case: Case):
    kernel, _ = KERNELS[case.kernel]
    launch = case.tiles.launch
    options = {name: launch[name] for name in launch if not name.startswith("BLOCK")}
    return triton.compile(
        ASTSource(kernel, *signature_of(case)),
        target=GPUTarget("cuda", case.capability, 32),
        options=options,
    )


def cuobjdump(cubin: bytes, option: str) -> str:
    """Output of NVIDIA's cuobjdump for a compiled kernel."""
    program = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [program, option, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def registers_and_stack(cubin):
    """Registers and bytes of stack per thread; a stack means that registers were spilled."""
    text = cuobjdump(cubin, "-res-usage")
    usage = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert usage, text
    return int(usage[1]), int(usage[2])


def matrix_instruction(ptx: str) -> str:
    """Matrix instruction of a kernel: Blackwell's, Hopper's or Ampere's, or scalar fma."""
    for instruction, name in (("tcgen05.mma", "tcgen05"), ("wgmma.mma_async", "wgmma")):
        if instruction in ptx:
            return name
    return "mma" if "mma.sync" in ptx else "fma"


def measure(case: Case) -> dict[str, object]:
    compiled = compile_case(case)
    registers, stack = registers_and_stack(compiled.asm["cubin"])
    return {
        "kernel": case.kernel,
        "table": case.table,
        "capability": case.capability,
        "block_d": case.block_d,
        "dtype": case.dtype,
        "precision": case.precision,
        "variant": case.variant,
        "tiles": asdict(case.tiles),
        "registers": registers,
        "stack": stack,
        "shared": compiled.metadata.shared,
        "instruction": matrix_instruction(compiled.asm["ptx"]),
        "tma": "cp.async.bulk.tensor" in compiled.asm["ptx"],
        "stirs": compiled.asm["ptx"].count(str(STIR.value)),
    }


def main():
    with ProcessPoolExecutor() as pool:
        sys.stdout.write(json.dumps(list(pool.map(measure, cases()))))


if __name__ == "__main__":
    main()
