"""Compile the shipped Hopper kernels for sm_90a and print the resources of each, as JSON.

An argument N limits this to the first N kernels of each pass. This is a separate program, because
test_compile.py runs where Triton interprets kernels.
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
from typing import Any

import torch
import triton
from triton import knobs

from kernels.hopper.backward.launch import (
    compile_bwd,
    compile_document_bounds,
    compile_preprocess,
    compile_split_reduce,
)
from kernels.hopper.backward.plan import BLOCK, KEYS, BackwardPlan, backward_plan
from kernels.hopper.forward.launch import compile_fwd
from kernels.hopper.forward.plan import (
    BLOCK_LIST_PLANS,
    SHORT_CAUSAL,
    SHORT_FULL,
    Plan,
    forward_plan,
)
from kernels.hopper.launch import DTYPES, parameter_layout
from kernels.options import Features
from tests.kernels.triton.compile_kernels import cuobjdump

# Dense calls on both sides of each threshold of a plan.
QUERIES = [SHORT_FULL, SHORT_CAUSAL, SHORT_CAUSAL + 1]
KEYS_OF_A_CALL = [SHORT_CAUSAL, SHORT_CAUSAL + 1, SHORT_CAUSAL + 128]
# Options of a call.
VARIANTS = [
    Features(lengths=True),
    Features(dropout=True),
    Features(causal=True, lengths=True, sinks=True),
    Features(causal=True, lengths=True, dropout=True),
    Features(causal=True, window=True),
    Features(causal=True, documents=True),
    Features(causal=True, alibi=True),
    Features(causal=True, lengths=True, softcap=True, sinks=True),
    Features(causal=True, dropout=True),
    Features(
        True, window=True, documents=True, lengths=True, softcap=True, sinks=True, dropout=True
    ),
]
# Block-sparse masks: without a block to mask, with a diagonal, with rows that see nothing.
MASKS = [
    Features(masked_loop=False),
    Features(causal=True),
    Features(causal=True, empty_rows=True),
]
BACKWARD_HEAD_DIMS = [64, 128]
INSTRUCTIONS = [
    *("HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG", "MUFU", "PRMT", "STL", "LDL"),
    *("REDG.E.ADD.F32x4", "LDG.E.128"),
]


@dataclass(frozen=True)
class Case:
    """One compilation of the forward kernel, or of one of the backward pass."""

    plan: Plan | BackwardPlan
    dtype: torch.dtype = torch.bfloat16
    side: str = ""  # a helper kernel: "preprocess", "document_bounds" or "split_reduce"

    @property
    def kernel(self) -> str:
        if isinstance(self.plan, Plan):
            return "fwd"
        return f"bwd_{self.side}" if self.side else "bwd"

    def compile(self) -> Any:
        if isinstance(self.plan, Plan):
            return compile_fwd(self.plan, self.dtype)
        if self.side == "preprocess":
            return compile_preprocess(self.plan, self.dtype, with_dlse=True)
        if self.side == "document_bounds":
            return compile_document_bounds()
        if self.side == "split_reduce":
            return compile_split_reduce(self.plan, self.dtype)
        return compile_bwd(self.plan, self.dtype)


def cases() -> Iterator[Case]:
    """All shipped kernels, the backward pass first."""
    yield from backward_cases()
    yield from forward_cases()


def backward_cases() -> Iterator[Case]:
    """Kernels that `attn_bwd` can use, each once in bf16, and one in fp16."""
    for head_dim in BACKWARD_HEAD_DIMS:
        for keys, causal in itertools.product([4096, 4000], [True, False]):
            plan = backward_plan(head_dim, keys, Features(causal=causal))
            assert plan is not None
            yield Case(plan)
        yield Case(plan, torch.float16)
        yield Case(plan, side="preprocess")
        masks = [
            replace(features, mask_block_size=block_size, packed=packed)
            for block_size, packed in [(KEYS, False), (KEYS, True), (BLOCK, False)]
            for features in (MASKS[0], MASKS[1], VARIANTS[-2], VARIANTS[-1])
            if head_dim > 64 or packed or block_size == BLOCK
        ]
        for features in [*VARIANTS, *masks]:
            plan = backward_plan(head_dim, 4096, features)
            assert plan is not None
            yield Case(plan)
        yield Case(plan, side="split_reduce")  # for masks
    yield Case(plan, side="document_bounds")


def forward_cases() -> Iterator[Case]:
    """Kernels that `attn_fwd` can use, each once in bf16, and one in fp16."""
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
    listed = (
        (d, 2000, 2000, replace(features, mask_block_size=block_size, packed=packed))
        for d, block_size in BLOCK_LIST_PLANS
        for features in [*MASKS, VARIANTS[-2], VARIANTS[-1]]
        for packed in ([False, True] if block_size == KEYS else [False])
    )
    unique = dict.fromkeys(Case(forward_plan(*call)) for call in (*dense, *variants, *listed))
    yield from unique
    yield replace(next(iter(unique)), dtype=torch.float16)


def compile_case(case: Case):
    """Compile a case; returns the kernel and the log of ptxas."""
    # Use Triton's own run of ptxas: a wheel has two versions, and only Triton knows the options.
    knobs.nvidia.dump_ptxas_log = True
    knobs.compilation.always_compile = True  # cached kernels have no log
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        compiled = case.compile()
    return compiled, log.getvalue()


def reused_barriers(ptx: str) -> list[int]:
    """Offsets in shared memory that hold a barrier and are also read or written as data.

    Triton reuses the memory of a barrier that is no longer used, without an mbarrier.inval. When
    another process preempts the program, the barrier is restored along with the program.
    """
    offsets = dict(re.findall(r"add\.s32\s+(%r\d+), %r\d+, (\d+);", ptx)) | {"global_smem": "0"}
    barriers = {int(offsets[x]) for x in re.findall(r"mbarrier\.init\S* \[(%r\d+)\]", ptx)}
    numbers = re.findall(r"(?:ld|st)\.shared\.[^;\[]*\[\s*(\w+|%r\d+)\s*\+\s*(\d+)\s*\]", ptx)
    places = {int(offsets[base]) + int(offset) for base, offset in numbers if base in offsets}
    assert barriers and places, "the compiler writes PTX in a different form"
    return sorted(x for x in barriers if any(x <= place < x + 8 for place in places))


def before_discards(ptx: str) -> list[str]:
    """Last event before each discard of memory: a read of it, or a barrier after all reads."""
    events = re.findall(r"ld\.global\.cg|bar\.sync|discard\.global", ptx)
    return [x for x, event in itertools.pairwise(events) if event == "discard.global"]


def measure(case: Case) -> dict[str, object]:
    plan = case.plan
    compiled, log = compile_case(case)
    usage = re.search(r"(\d+) bytes stack frame.*Used (\d+) registers", log, re.DOTALL)
    assert usage, log
    sass = cuobjdump(compiled.asm["cubin"], "-sass")
    dense = asdict(Features())
    forward_fields = {}
    if isinstance(plan, Plan):
        forward_fields = {
            "groups": plan.teams * plan.groups,
            "cut": plan.cut,
            "pingpong": plan.pingpong,
        }
    return forward_fields | {
        "kernel": case.kernel,
        "triton": triton.__version__,
        "two_groups": isinstance(plan, BackwardPlan) and plan.groups == 2,
        "block_d": plan.block_d,
        "features": [name for name, x in asdict(plan.features).items() if x != dense[name]],
        "dtype": DTYPES[case.dtype].name,
        "stack": int(usage[1]),  # bytes per thread
        "registers": int(usage[2]),
        "notes": sorted(set(re.findall(r"C75\d\d", log))),  # from ptxas, on wgmma and setmaxnreg
        "shared": compiled.metadata.shared,  # bytes per program
        # of a launch, as a `struct` format
        "parameters": re.sub(r"\d+x|<", "", parameter_layout(compiled.asm["ptx"])[0].format),
        # named barriers: [number, threads], or the number alone for all threads of a program
        "barriers": sorted(
            {
                tuple(int(x, 16) for x in operands.split(", "))
                for operands in re.findall(r"\bBAR\.\S+ (0x[^;]*?) *;", sass)
            }
        ),
        "reused_barriers": [] if case.side else reused_barriers(compiled.asm["ptx"]),
        # loads of memory that other programs write: acquire loads, and relaxed loads that poll
        "acquires": len(re.findall(r"ld\.global\.gpu\.acquire", compiled.asm["ptx"])),
        "relaxed": len(re.findall(r"ld\.global\.gpu\.relaxed", compiled.asm["ptx"])),
        "before_discards": before_discards(compiled.asm["ptx"]),
        "instructions": {x: len(re.findall(rf"\b{re.escape(x)}\b", sass)) for x in INSTRUCTIONS},
    }


def main():
    selected = list(cases())
    if len(sys.argv) > 1:
        passes = (backward_cases(), forward_cases())
        selected = [x for cases in passes for x in itertools.islice(cases, int(sys.argv[1]))]
    with ProcessPoolExecutor() as pool:
        sys.stdout.write(json.dumps(list(pool.map(measure, selected))))


if __name__ == "__main__":
    main()
