"""Compile what ships of the Hopper kernel for sm_90a and print what each needs, as JSON.

With a number, the first so many alone. A program of its own, because test_compile.py runs where
Triton interprets kernels.
"""

import contextlib
import io
import itertools
import json
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from kernels.hopper.fwd import attn_fwd_kernel
from kernels.hopper.launch import DTYPES, tile_layout
from kernels.hopper.tiles import ROWS, SHORT, Plan, forward_plan
from kernels.options import Features
from tests.kernels.triton.compile_kernels import OPTIONAL_POINTERS, cuobjdump, pointer_type

# Dense calls on both sides of what a plan depends on
QUERIES = [SHORT, SHORT + 1]
KEYS_OF_A_CALL = [SHORT, SHORT + 1, SHORT + 128]
# and what else a causal call may ask for.
VARIANTS = [
    Features(causal=True, window=True),
    Features(causal=True, documents=True),
    Features(causal=True, lengths=True, softcap=True, sinks=True),
    Features(causal=True, dropout=True),
    Features(
        True, window=True, documents=True, lengths=True, softcap=True, sinks=True, dropout=True
    ),
]
INSTRUCTIONS = ["HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG", "MUFU", "PRMT", "STL", "LDL"]


@dataclass(frozen=True)
class Case:
    """One compilation of the forward kernel."""

    plan: Plan
    dtype: torch.dtype = torch.bfloat16


def cases() -> Iterator[Case]:
    """What `kernels.hopper.fwd.attn_fwd` can ask for, each once, in bf16; and one in fp16."""
    head_dims = [64, 128]
    dense = itertools.product(
        head_dims, QUERIES, KEYS_OF_A_CALL, [Features(causal=True), Features()]
    )
    variants = itertools.product(head_dims, [SHORT], [SHORT], VARIANTS)
    found = dict.fromkeys(Case(forward_plan(*call)) for call in (*dense, *variants))
    yield from found
    yield replace(next(iter(found)), dtype=torch.float16)


def signature_of(case: Case) -> tuple[dict, dict, dict]:
    """Types, constants and alignment of a call on tensors that the copy engine can read."""
    names = attn_fwd_kernel.arg_names
    plan = case.plan
    rows = {"q": ROWS, "k": plan.block_n, "v": plan.block_n, "out": ROWS}
    dtype = DTYPES[case.dtype].name
    constants: dict[str, object] = {"plan": plan}
    for arg, feature in OPTIONAL_POINTERS.items():
        if not getattr(plan.features, feature):
            constants[arg] = None
    constants = {arg: value for arg, value in constants.items() if arg in names}
    signature, attributes = {}, {}
    for i, arg in enumerate(names):
        if arg in constants:
            signature[arg] = "constexpr"
        elif arg in rows:
            layout = tile_layout(rows[arg], plan.block_d, case.dtype)
            shape = [1, 1, rows[arg], plan.block_d]
            signature[arg] = f"tensordesc<{dtype}{shape},{layout!r}>"
        elif arg == "counter" or arg.endswith("_ptr"):
            signature[arg] = "*i32" if arg == "counter" else pointer_type(arg)
            # side tensors are taken as they come
            attributes[(i,)] = [] if arg in OPTIONAL_POINTERS else [["tt.divisibility", 16]]
        else:
            signature[arg] = "fp32" if "scale" in arg else "i32"
    return signature, {(names.index(arg),): x for arg, x in constants.items()}, attributes


def compile_case(case: Case):
    """The compiled kernel, and what ptxas said of it."""
    signature, constants, attributes = signature_of(case)
    # Triton's own run of ptxas: a wheel has two of them, and options that only Triton knows
    knobs.nvidia.dump_ptxas_log = True
    knobs.compilation.always_compile = True  # nothing is said of what the cache has
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        compiled = triton.compile(
            GluonASTSource(attn_fwd_kernel, signature, constants, attributes),
            target=GPUTarget("cuda", 90, 32),
            options=case.plan.compiler_options,
        )
    return compiled, log.getvalue()


def measure(case: Case) -> dict[str, object]:
    plan = case.plan
    compiled, log = compile_case(case)
    found = re.search(r"(\d+) bytes stack frame.*Used (\d+) registers", log, re.DOTALL)
    assert found, log
    sass = cuobjdump(compiled.asm["cubin"], "-sass")
    dense = asdict(Features())
    return {
        "block_d": plan.block_d,
        "groups": plan.groups,
        "cut": plan.cut,
        "features": [name for name, x in asdict(plan.features).items() if x != dense[name]],
        "dtype": DTYPES[case.dtype].name,
        "stack": int(found[1]),  # bytes of a thread
        "registers": int(found[2]),
        "notes": sorted(set(re.findall(r"C75\d\d", log))),  # of ptxas, on wgmma and setmaxnreg
        "shared": compiled.metadata.shared,  # bytes of a program
        "instructions": {x: len(re.findall(rf"\b{x}\b", sass)) for x in INSTRUCTIONS},
    }


def main():
    first = int(sys.argv[1]) if len(sys.argv) > 1 else None
    with ProcessPoolExecutor() as pool:
        sys.stdout.write(json.dumps(list(pool.map(measure, itertools.islice(cases(), first)))))


if __name__ == "__main__":
    main()
