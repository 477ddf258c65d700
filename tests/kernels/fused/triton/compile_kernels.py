"""Compile the kernels of a training step except attention; print the resources of each, as JSON.

For sm_80, sm_90 and sm_100. A separate program, like tests/kernels/triton/compile_kernels.py.
"""

import json
import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.fused.triton import (
    adamw,
    cross_entropy,
    gelu,
    layer_norm,
    muon,
    rotary,
    sums,
    symmetric,
)
from kernels.triton import merge
from tests.kernels.triton.compile_kernels import registers_and_stack

TILES = {"ROWS": gelu.ROWS, "COLUMNS": gelu.COLUMNS}
LOSS = {"BLOCK_V": cross_entropy.BLOCK_V, "weights_ptr": None}
ROTARY = ("half", "HALF", "ROWS", "NUM_STAGES")
# name -> kernel, its constants, and its launch options
KERNELS = {
    "adamw": (
        adamw.adamw_kernel,
        {"BETA1": 0.9, "BETA2": 0.95, "LOG2_BETA1": -0.152, "LOG2_BETA2": -0.074}
        | {"CAST": tl.bfloat16, "ALIGNED": True, "BLOCK": adamw.BLOCK},
        {"num_warps": adamw.NUM_WARPS},
    ),
    "muon, momentum": (
        muon.momentum_kernel,
        {"MOMENTUM": 0.95, "ALIGNED": True, "BLOCK": muon.BLOCK},
        {"num_warps": muon.NUM_WARPS},
    ),
    **{
        f"muon, apply, {contiguous}": (
            muon.apply_kernel,
            {contiguous: 1, "CAST": tl.bfloat16} | {"ALIGNED": True, "TILE": muon.TILE},
            {"num_warps": muon.NUM_WARPS},
        )
        for contiguous in ("column_stride", "row_stride")
    },
    **{
        f"symmetric, {contiguous}": (
            symmetric.symmetric_kernel,
            {f"a_{contiguous}": 1, f"b_{contiguous}": 1}
            | {"TILE": symmetric.TILE, "BLOCK_K": symmetric.BLOCK_K},
            {"num_warps": symmetric.NUM_WARPS, "num_stages": symmetric.NUM_STAGES},
        )
        for contiguous in ("inner_stride", "row_stride")
    },
    "add_parts": (sums.add_parts_kernel, {"ROWS": sums.ROWS, "COLUMNS": sums.COLUMNS}, {}),
    "bias and GELU": (gelu.bias_gelu_kernel, TILES, {"num_warps": gelu.NUM_WARPS}),
    "gradient of bias and GELU": (
        gelu.bias_gelu_bwd_kernel,
        TILES | {"STEPS": gelu.STEPS, "NUM_STAGES": gelu.NUM_STAGES},
        {"num_warps": gelu.NUM_WARPS},
    ),
    **{
        f"cross_entropy, softcap {softcap}": (
            cross_entropy.cross_entropy_kernel,
            LOSS | {"SOFTCAP": softcap, "WITH_GRADIENTS": True},
            {"num_warps": cross_entropy.NUM_WARPS, "maxnreg": registers},
        )
        for softcap, registers in (
            (None, cross_entropy.MAX_REGISTERS),
            ("small", cross_entropy.MAX_REGISTERS),
            ("large", None),
        )
    },
    **{
        f"merge, {head_dim}": (
            merge.merge_kernel,
            {"HEAD_DIM": head_dim, "BLOCK_D": block_d, "ROWS": merge.ROWS},
            {},
        )
        for head_dim, block_d in ((64, 64), (96, 128), (256, 256))
    },
    **{
        f"layer_norm_bwd, {width}": (
            layer_norm.layer_norm_bwd_kernel,
            {"BLOCK_C": width, "NUM_STAGES": layer_norm.NUM_STAGES},
            {"num_warps": width // layer_norm.COLUMNS_PER_WARP},
        )
        for width in (1024, 2048)
    },
    **{
        f"rotary{name}, {head_dim}": (
            kernel,
            {
                **{k: rotary.options_of(head_dim)[k] for k in ROTARY},
                **({} if normalised else {"q_weight_ptr": None, "k_weight_ptr": None} | unused),
            },
            {"num_warps": rotary.NUM_WARPS},
        )
        for head_dim in (64, 128, 256)
        for kernel, direction, without in (
            (rotary.rotary_kernel, "", {}),
            (rotary.rotary_bwd_kernel, "_bwd", {"qkv_ptr": None}),
        )
        for name, normalised, unused in (
            (f"{direction}, normalised", True, {}),
            (direction, False, without),
        )
    },
    "rms_norm_bwd": (
        layer_norm.layer_norm_bwd_kernel,
        {"BLOCK_C": 1024, "NUM_STAGES": layer_norm.NUM_STAGES, "mean_ptr": None},
        {"num_warps": 1024 // layer_norm.COLUMNS_PER_WARP},
    ),
}
FP32 = (
    *("bias_ptr", "sums_ptr", "losses_ptr", "softcap", "z_loss"),
    *("mean_ptr", "rstd_ptr", "weight_ptr", "parts_ptr"),
    *("lse_ptr", "part_lse_ptr"),
    *("lr_ptr", "divisor_ptr", "skip_ptr", "eps", "weight_decay", "factors_ptr"),
    *("alpha", "beta", "gamma"),
    *("cos_ptr", "sin_ptr", "q_weight_ptr", "k_weight_ptr"),
)
FP16 = ("a_ptr", "b_ptr", "addend_ptr", "product_ptr")
MULTIPLES_OF_16 = (
    *("width", "logits_stride", "n_columns", "parts_stride"),
    *("size", "n_rows", "batch_stride", "row_stride", "column_stride"),
    *("n_inner", "a_batch_stride", "a_row_stride", "a_inner_stride"),
    *("b_batch_stride", "b_row_stride", "b_inner_stride"),
)


def type_of(name: str, dtype: str) -> str:
    """Type of a parameter that is not a constant."""
    if name in ("targets_ptr", "addresses_ptr", "sizes_ptr"):
        return "*i64"
    if name == "blocks_ptr":
        return "*i32"
    if name in FP16:
        return "*fp16"
    if name.endswith("_ptr"):
        return f"*{'fp32' if name in FP32 else dtype}"
    return "fp32" if name in FP32 else "i32"


def measure(name: str, capability: int, dtype: str) -> dict[str, object]:
    kernel, constants, options = KERNELS[name]
    names = kernel.arg_names
    signature = {arg: "constexpr" if arg in constants else type_of(arg, dtype) for arg in names}
    constexprs = {(names.index(arg),): value for arg, value in constants.items()}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, arg in enumerate(names)
        if arg not in constants and (arg.endswith("_ptr") or arg in MULTIPLES_OF_16)
    }
    compiled = triton.compile(
        ASTSource(kernel, signature, constexprs, aligned),
        target=GPUTarget("cuda", capability, 32),
        options=options,
    )
    registers, stack = registers_and_stack(compiled.asm["cubin"])
    shared = compiled.metadata.shared
    return {
        "kernel": name,
        "capability": capability,
        "dtype": dtype,
        "registers": registers,
        "stack": stack,
        "shared": shared,
    }


def main() -> None:
    results = [
        measure(name, capability, dtype)
        for name in KERNELS
        for capability in (80, 90, 100)
        for dtype in ("bf16", "fp32")
    ]
    sys.stdout.write(json.dumps(results))


if __name__ == "__main__":
    main()
