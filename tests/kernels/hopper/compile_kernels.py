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
from triton import knobs

from kernels.hopper.fwd import compile_fwd
from kernels.hopper.launch import DTYPES, parameter_layout
from kernels.hopper.tiles import SHORT_CAUSAL, SHORT_FULL, Plan, forward_plan
from kernels.options import Features
from tests.kernels.triton.compile_kernels import cuobjdump

# Dense calls on both sides of what a plan depends on
QUERIES = [SHORT_FULL, SHORT_CAUSAL, SHORT_CAUSAL + 1]
KEYS_OF_A_CALL = [SHORT_CAUSAL, SHORT_CAUSAL + 1, SHORT_CAUSAL + 128]
# and what else a call may ask for.
VARIANTS = [
    Features(lengths=True),
    Features(dropout=True),
    Features(causal=True, lengths=True, sinks=True),
    Features(causal=True, lengths=True, dropout=True),
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
    head_dims = [64, 128, 256]
    dense = itertools.product(
        head_dims, QUERIES, KEYS_OF_A_CALL, [Features(causal=True), Features()]
    )
    variants = (
        (d, tokens, tokens, features)
        for d, tokens, features in itertools.product(
            head_dims, [SHORT_FULL, 2 * SHORT_CAUSAL], VARIANTS
        )
    )
    found = dict.fromkeys(Case(forward_plan(*call)) for call in (*dense, *variants))
    yield from found
    yield replace(next(iter(found)), dtype=torch.float16)


def compile_case(case: Case):
    """The compiled kernel, and what ptxas said of it."""
    # Triton's own run of ptxas: a wheel has two of them, and options that only Triton knows
    knobs.nvidia.dump_ptxas_log = True
    knobs.compilation.always_compile = True  # nothing is said of what the cache has
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        compiled = compile_fwd(case.plan, case.dtype)
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
        # of a launch, as `struct` names them
        "parameters": re.sub(r"\d+x|<", "", parameter_layout(compiled.asm["ptx"])[0].format),
        "turns": plan.turns,
        # named barriers: [number, threads], or the number alone for all threads of a program
        "barriers": sorted(
            {
                tuple(int(x, 16) for x in operands.split(", "))
                for operands in re.findall(r"\bBAR\.\S+ (0x[^;]*?) *;", sass)
            }
        ),
        "instructions": {x: len(re.findall(rf"\b{x}\b", sass)) for x in INSTRUCTIONS},
    }


def main():
    first = int(sys.argv[1]) if len(sys.argv) > 1 else None
    with ProcessPoolExecutor() as pool:
        sys.stdout.write(json.dumps(list(pool.map(measure, itertools.islice(cases(), first)))))


if __name__ == "__main__":
    main()
