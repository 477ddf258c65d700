"""Compile the gemms with a GELU for sm_90a and print the resources of each, as JSON.

This is a separate program, like compile_kernels.py.
"""

import json
import re
import sys
from dataclasses import dataclass
from typing import Any

import torch

from kernels.hopper.gemm.gelu import FORWARD, backward_plan
from kernels.hopper.gemm.gemm import GemmPlan, compile_gemm
from kernels.hopper.launch import parameter_layout
from tests.kernels.hopper.compile_kernels import compile_case, reused_barriers
from tests.kernels.triton.compile_kernels import cuobjdump, registers_and_stack

INSTRUCTIONS = ("HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG", "MUFU")


@dataclass(frozen=True)
class Case:
    plan: GemmPlan
    dtype: torch.dtype

    def compile(self) -> Any:
        return compile_gemm(self.plan, self.dtype)


def measure(case: Case) -> dict[str, object]:
    compiled, log = compile_case(case)
    sass = cuobjdump(compiled.asm["cubin"], "-sass")
    _, stack = registers_and_stack(compiled.asm["cubin"])
    return {
        "gradient": case.plan.gradient,
        "stores_g": case.plan.stores_g,
        "bias": case.plan.bias,
        "dtype": str(case.dtype),
        "stack": stack,
        "shared": compiled.metadata.shared,
        "notes": sorted(set(re.findall(r"C75\d\d", log))),
        "parameters": re.sub(r"\d+x|<", "", parameter_layout(compiled.asm["ptx"])[0].format),
        "reused_barriers": reused_barriers(compiled.asm["ptx"]),
        "instructions": {x: len(re.findall(rf"\b{x}\b", sass)) for x in INSTRUCTIONS},
    }


def main() -> None:
    kinds = [(bias, recompute) for bias in (True, False) for recompute in (False, True)]
    plans = [FORWARD, *(backward_plan(bias=bias, recompute=again) for bias, again in kinds)]
    cases = [Case(plan, torch.bfloat16) for plan in plans] + [Case(FORWARD, torch.float16)]
    sys.stdout.write(json.dumps([measure(case) for case in cases]))


if __name__ == "__main__":
    main()
