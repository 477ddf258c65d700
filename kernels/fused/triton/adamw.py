"""One step of AdamW for many weights in a single launch.

Weights differ in size, so the kernel reads two tables: which block of which tensor a program
updates, and the addresses of each tensor.
"""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .addresses import AddressTable, are_aligned, dtype_of, tensor_at

BLOCK, NUM_WARPS = 2048, 8


@triton.jit
def adamw_kernel(
    blocks_ptr,  # (programs, 2) int32: tensor, and block within it
    # (n, 6) int64, addresses of: weight, gradient, two moments, cast (0: none), number of steps
    addresses_ptr,
    sizes_ptr,  # (n,) int64: elements of each tensor
    lr_ptr,  # () fp32
    divisor_ptr,  # () fp32: divisor of all gradients; None: 1
    skip_ptr,  # () fp32: skip the step unless it is 0; None: 0
    eps, weight_decay,
    BETA1: tl.constexpr, BETA2: tl.constexpr, LOG2_BETA1: tl.constexpr, LOG2_BETA2: tl.constexpr,
    CAST: tl.constexpr,  # dtype of casts; None: there are none
    ALIGNED: tl.constexpr,  # 16 bytes divide all sizes and addresses, so loads are vectorised
    BLOCK: tl.constexpr,
):  # fmt: skip
    # Find the block of this program.
    program = tl.program_id(0).to(tl.int64)
    tensor = tl.load(blocks_ptr + 2 * program)
    first = tl.load(blocks_ptr + 2 * program + 1).to(tl.int64) * BLOCK
    at = first + tl.arange(0, BLOCK)
    size = tl.load(sizes_ptr + tensor)
    # A CUDA graph cannot leave out a launch, so a skipped step masks all of its loads and stores.
    if skip_ptr is not None:
        size = tl.where(tl.load(skip_ptr) == 0.0, size, 0)
    # Masked accesses are vectorised only if this bound is known to be a multiple of the vector
    # size.
    if ALIGNED:
        size = tl.multiple_of(size, 4)
    inside = at < size
    row = addresses_ptr + 6 * tensor
    weights = tensor_at(row, tl.float32, ALIGNED) + at
    gradients = tensor_at(row + 1, tl.float32, ALIGNED) + at
    means = tensor_at(row + 2, tl.float32, ALIGNED) + at
    squares = tensor_at(row + 3, tl.float32, ALIGNED) + at
    step = tl.load(tensor_at(row + 5, tl.float32, False))
    lr = tl.load(lr_ptr)

    # Update the moments.
    w = tl.load(weights, inside, other=0.0)
    g = tl.load(gradients, inside, other=0.0)
    m = tl.load(means, inside, other=0.0)
    v = tl.load(squares, inside, other=0.0)
    if divisor_ptr is not None:
        g = g / tl.load(divisor_ptr)
    m += (g - m) * (1.0 - BETA1)
    v += (g * g - v) * (1.0 - BETA2)
    # Bias corrections in fp64: 1 - beta^step has few digits in fp32 early on, with beta near 1.
    m_correction = (1.0 - tl.exp2(step.to(tl.float64) * LOG2_BETA1)).to(tl.float32)
    v_correction = (1.0 - tl.exp2(step.to(tl.float64) * LOG2_BETA2)).to(tl.float32)
    # Update the weight, with decoupled decay. tl.sqrt is an approximation; sqrt_rn rounds
    # correctly, as PyTorch's sqrt does.
    root = tl.sqrt_rn(v) / tl.sqrt_rn(v_correction) + eps
    w = w * (1.0 - lr * weight_decay) - lr / m_correction * (m / root)
    tl.store(weights, w, inside)
    tl.store(means, m, inside)
    tl.store(squares, v, inside)
    # Write the cast of the weight for the next step's matrix products, if this weight has one.
    if CAST is not None:
        size = tl.where(tl.load(row + 4) == 0, 0, size)
        if ALIGNED:
            size = tl.multiple_of(size, 4)
        tl.store(tensor_at(row + 4, CAST, ALIGNED) + at, w.to(CAST), at < size)


class AdamWLaunch:
    """Launcher for one group of weights; rebuilds its tables only if tensors have moved."""

    def __init__(self) -> None:
        self._sizes: tuple[int, ...] = ()
        self._blocks: list[Tensor] = []
        self._addresses = AddressTable()

    def __call__(
        self, tensors: Sequence[tuple[Tensor, ...]], casts: Sequence[Tensor | None],
        *, lr: Tensor, betas: tuple[float, float], eps: float, weight_decay: float,
        divisor: Tensor | None, skip: Tensor | None,
    ) -> None:  # fmt: skip
        """Take a step.

        Args:
            tensors: for each weight: itself, its gradient and its two moments, all fp32, contiguous
                and of one shape, and the number of this step, () fp32, from 1. All on one device.
            casts: for each weight, contiguous, of its shape, all of one dtype; written as well.
            lr: () fp32.
            divisor: () fp32; gradients are divided by it. None: 1.
            skip: () fp32; unless it is 0, nothing changes. None: 0.
        """
        device = tensors[0][0].device
        self._update_blocks([weight.numel() for weight, *_ in tensors], device)
        rows = [(*row[:4], cast, row[4]) for row, cast in zip(tensors, casts, strict=True)]
        addresses = self._addresses.update([x for row in rows for x in row], device)
        # Step counters are loaded one by one, so their alignment does not matter.
        aligned = all(n % 4 == 0 for n in self._sizes) and are_aligned(
            x for row in rows for x in row[:5]
        )
        blocks, sizes = self._blocks
        with torch.cuda.device_of(tensors[0][0]):
            adamw_kernel[(len(blocks),)](
                blocks, addresses, sizes, lr, divisor, skip, eps, weight_decay,
                *betas, *(math.log2(beta) if beta else -math.inf for beta in betas),
                CAST=dtype_of(casts), ALIGNED=aligned, BLOCK=BLOCK, num_warps=NUM_WARPS,
                enable_fp_fusion=True,
            )  # fmt: skip

    def _update_blocks(self, sizes: Sequence[int], device: torch.device) -> None:
        """Rebuild the tables of blocks and sizes if they do not match these sizes."""
        if self._sizes == tuple(sizes):
            return
        n = torch.tensor(sizes)
        n_blocks = -(-n // BLOCK)
        tensor = torch.arange(len(n)).repeat_interleave(n_blocks)
        block = torch.arange(len(tensor)) - (n_blocks.cumsum(0) - n_blocks)[tensor]
        blocks = torch.stack([tensor, block], 1).int()
        self._sizes = tuple(sizes)
        self._blocks = [self._addresses.put(blocks, device), self._addresses.put(n, device)]
