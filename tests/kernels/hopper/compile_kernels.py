"""Compile what ships of the Hopper kernels for sm_90a and print what each needs, as JSON.

With a number, the first so many of each pass alone. A program of its own, because test_compile.py
runs where Triton interprets kernels.
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
# Of a block-sparse mask: without a block to mask, with a diagonal, with rows that see nothing.
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
    side: str = ""  # "preprocess", "document_bounds" or "split_reduce": a small kernel beside it

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
    """What ships, the backward pass first."""
    yield from backward_cases()
    yield from forward_cases()


def backward_cases() -> Iterator[Case]:
    """What `attn_bwd` can ask for, each once, in bf16; and one in fp16."""
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
        yield Case(plan, side="split_reduce")  # of a mask
    yield Case(plan, side="document_bounds")


def forward_cases() -> Iterator[Case]:
    """What `attn_fwd` can ask for, each once, in bf16; and one in fp16."""
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
    found = dict.fromkeys(Case(forward_plan(*call)) for call in (*dense, *variants, *listed))
    yield from found
    yield replace(next(iter(found)), dtype=torch.float16)


def compile_case(case: Case):
    """The compiled kernel, and what ptxas said of it."""
    # Triton's own run of ptxas: a wheel has two of them, and options that only Triton knows
    knobs.nvidia.dump_ptxas_log = True
    knobs.compilation.always_compile = True  # nothing is said of what the cache has
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        compiled = case.compile()
    return compiled, log.getvalue()


def reused_barriers(ptx: str) -> list[int]:
    """Where in shared memory a barrier was made, and numbers are read or written, too.

    Triton gives the memory of a barrier that nobody uses to others, without an mbarrier.inval. When
    another process takes the GPU from a program and gives it back, the barrier is back as well.
    """
    offsets = dict(re.findall(r"add\.s32\s+(%r\d+), %r\d+, (\d+);", ptx)) | {"global_smem": "0"}
    barriers = {int(offsets[x]) for x in re.findall(r"mbarrier\.init\S* \[(%r\d+)\]", ptx)}
    numbers = re.findall(r"(?:ld|st)\.shared\.[^;\[]*\[\s*(\w+|%r\d+)\s*\+\s*(\d+)\s*\]", ptx)
    places = {int(offsets[base]) + int(offset) for base, offset in numbers if base in offsets}
    assert barriers and places, "the compiler writes PTX in another way"
    return sorted(x for x in barriers if any(x <= place < x + 8 for place in places))


def before_discards(ptx: str) -> list[str]:
    """What comes last before memory is given up: a read of it, or a barrier behind all reads."""
    events = re.findall(r"ld\.global\.cg|bar\.sync|discard\.global", ptx)
    return [x for x, then in itertools.pairwise(events) if then == "discard.global"]


def measure(case: Case) -> dict[str, object]:
    plan = case.plan
    compiled, log = compile_case(case)
    found = re.search(r"(\d+) bytes stack frame.*Used (\d+) registers", log, re.DOTALL)
    assert found, log
    sass = cuobjdump(compiled.asm["cubin"], "-sass")
    dense = asdict(Features())
    of_forward = {}
    if isinstance(plan, Plan):
        of_forward = {
            "groups": plan.teams * plan.groups,
            "cut": plan.cut,
            "pingpong": plan.pingpong,
        }
    return of_forward | {
        "kernel": case.kernel,
        "two_groups": isinstance(plan, BackwardPlan) and plan.groups == 2,
        "block_d": plan.block_d,
        "features": [name for name, x in asdict(plan.features).items() if x != dense[name]],
        "dtype": DTYPES[case.dtype].name,
        "stack": int(found[1]),  # bytes of a thread
        "registers": int(found[2]),
        "notes": sorted(set(re.findall(r"C75\d\d", log))),  # of ptxas, on wgmma and setmaxnreg
        "shared": compiled.metadata.shared,  # bytes of a program
        # of a launch, as `struct` names them
        "parameters": re.sub(r"\d+x|<", "", parameter_layout(compiled.asm["ptx"])[0].format),
        # named barriers: [number, threads], or the number alone for all threads of a program
        "barriers": sorted(
            {
                tuple(int(x, 16) for x in operands.split(", "))
                for operands in re.findall(r"\bBAR\.\S+ (0x[^;]*?) *;", sass)
            }
        ),
        "reused_barriers": [] if case.side else reused_barriers(compiled.asm["ptx"]),
        # of memory that other programs write: what is read after them, and what is read to wait
        "acquires": len(re.findall(r"ld\.global\.gpu\.acquire", compiled.asm["ptx"])),
        "relaxed": len(re.findall(r"ld\.global\.gpu\.relaxed", compiled.asm["ptx"])),
        "before_discards": before_discards(compiled.asm["ptx"]),
        "instructions": {x: len(re.findall(rf"\b{re.escape(x)}\b", sass)) for x in INSTRUCTIONS},
    }


def main():
    chosen = list(cases())
    if len(sys.argv) > 1:
        passes = (backward_cases(), forward_cases())
        chosen = [x for cases in passes for x in itertools.islice(cases, int(sys.argv[1]))]
    with ProcessPoolExecutor() as pool:
        sys.stdout.write(json.dumps(list(pool.map(measure, chosen))))


if __name__ == "__main__":
    main()
