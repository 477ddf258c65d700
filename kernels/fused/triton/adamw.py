"""A step of AdamW over many weights in one launch.

Weights differ in size, so a table tells each program which block of which tensor is its own, and
another where that tensor lies.
"""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, NUM_WARPS = 2048, 8

_TRITON = {None: None, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _numbers_at(address, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """A pointer to numbers from their address, which 16 bytes divide if it is `ALIGNED`."""
    pointer = tl.load(address).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def adamw_kernel(
    blocks_ptr,  # (programs, 2) int32: which tensor, and which block of it
    # (n, 6) int64: of a weight, its gradient, its two moments, its cast or 0, and its steps
    addresses_ptr,
    sizes_ptr,  # (n,) int64: numbers in it
    lr_ptr,  # () fp32
    divisor_ptr,  # () fp32: of all gradients; None: 1
    skip_ptr,  # () fp32: nothing is done if it is not 0; None: 0
    eps,
    weight_decay,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    LOG2_BETA1: tl.constexpr,
    LOG2_BETA2: tl.constexpr,
    CAST: tl.constexpr,  # the dtype of casts; None: there are none
    ALIGNED: tl.constexpr,  # 16 bytes divide all tensors and where they lie: vectors are loaded
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    tensor = tl.load(blocks_ptr + 2 * program)
    first = tl.load(blocks_ptr + 2 * program + 1).to(tl.int64) * BLOCK
    at = first + tl.arange(0, BLOCK)
    size = tl.load(sizes_ptr + tensor)
    if skip_ptr is not None:
        size = tl.where(tl.load(skip_ptr) == 0.0, size, 0)
    if ALIGNED:
        size = tl.multiple_of(size, 4)
    inside = at < size
    row = addresses_ptr + 6 * tensor
    weights = _numbers_at(row, tl.float32, ALIGNED) + at
    gradients = _numbers_at(row + 1, tl.float32, ALIGNED) + at
    means = _numbers_at(row + 2, tl.float32, ALIGNED) + at
    squares = _numbers_at(row + 3, tl.float32, ALIGNED) + at
    step = tl.load(_numbers_at(row + 5, tl.float32, False))
    lr = tl.load(lr_ptr)

    w = tl.load(weights, inside, other=0.0)
    g = tl.load(gradients, inside, other=0.0)
    m = tl.load(means, inside, other=0.0)
    v = tl.load(squares, inside, other=0.0)
    if divisor_ptr is not None:
        g = g / tl.load(divisor_ptr)
    m += (g - m) * (1.0 - BETA1)
    v += (g * g - v) * (1.0 - BETA2)
    # 1 - beta^step has few digits in fp32 when the step is early and beta near 1
    of_m = (1.0 - tl.exp2(step.to(tl.float64) * LOG2_BETA1)).to(tl.float32)
    of_v = (1.0 - tl.exp2(step.to(tl.float64) * LOG2_BETA2)).to(tl.float32)
    root = tl.sqrt_rn(v) / tl.sqrt_rn(of_v) + eps
    w = w * (1.0 - lr * weight_decay) - lr / of_m * (m / root)
    tl.store(weights, w, inside)
    tl.store(means, m, inside)
    tl.store(squares, v, inside)
    if CAST is not None:
        size = tl.where(tl.load(row + 4) == 0, 0, size)
        if ALIGNED:
            size = tl.multiple_of(size, 4)
        tl.store(_numbers_at(row + 4, CAST, ALIGNED) + at, w.to(CAST), at < size)


class AdamWLaunch:
    """Steps of one group of weights, most of which stay where they are: tables are made seldom."""

    def __init__(self) -> None:
        self._sizes: tuple[int, ...] = ()
        self._addresses: tuple[int, ...] = ()
        self._tables: list[Tensor] = []
        self._captured: list[Tensor] = []

    def __call__(
        self,
        tensors: Sequence[tuple[Tensor, ...]],
        casts: Sequence[Tensor | None],
        *,
        lr: Tensor,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        divisor: Tensor | None,
        skip: Tensor | None,
    ) -> None:
        """Take a step.

        Args:
            tensors: of each weight: itself, its gradient, its two moments, all fp32, contiguous and
                of one shape, and the number of this step, () fp32, from 1. All on one device.
            casts: of each weight, contiguous and of its shape, all of one dtype: written, too.
            lr, divisor, skip: () fp32; gradients are divided by the second, and nothing changes
                where the third is not 0. None: 1 and 0.
        """
        weight = tensors[0][0]
        dtypes = {cast.dtype for cast in casts if cast is not None}
        (dtype,) = dtypes or {None}
        self._find(tensors, casts, weight.device)
        blocks, sizes, addresses = self._tables
        of_numbers = [a for i, a in enumerate(self._addresses) if i % 6 != 5]
        aligned = all(n % 4 == 0 for n in self._sizes) and all(a % 16 == 0 for a in of_numbers)
        with torch.cuda.device_of(weight):
            adamw_kernel[(len(blocks),)](
                blocks, addresses, sizes, lr, divisor, skip, eps, weight_decay,
                BETA1=betas[0], BETA2=betas[1], LOG2_BETA1=_log2(betas[0]),
                LOG2_BETA2=_log2(betas[1]), CAST=_TRITON[dtype], ALIGNED=aligned, BLOCK=BLOCK,
                num_warps=NUM_WARPS,
            )  # fmt: skip

    def _find(
        self,
        tensors: Sequence[tuple[Tensor, ...]],
        casts: Sequence[Tensor | None],
        device: torch.device,
    ) -> None:
        """Make the tables that are not of these tensors."""
        of_weights = tuple(weight.numel() for weight, *_ in tensors)
        if of_weights != self._sizes:
            sizes = torch.tensor(of_weights)
            n_blocks = (sizes + BLOCK - 1) // BLOCK
            tensor = torch.arange(len(sizes)).repeat_interleave(n_blocks)
            block = torch.arange(len(tensor)) - (n_blocks.cumsum(0) - n_blocks)[tensor]
            blocks = torch.stack([tensor, block], 1).int()
            self._sizes, self._addresses = of_weights, ()
            self._tables = [self._put(blocks, device), self._put(sizes, device)]
        addresses = tuple(
            0 if x is None else x.data_ptr()
            for (*of_weight, step), cast in zip(tensors, casts, strict=True)
            for x in (*of_weight, cast, step)
        )
        if addresses != self._addresses:
            self._addresses = addresses
            self._tables[2:] = [self._put(torch.tensor(addresses), device)]

    def _put(self, table: Tensor, device: torch.device) -> Tensor:
        """A table on the device, by a copy for which nothing waits and which may be captured."""
        if device.type != "cuda":
            return table
        table = table.pin_memory()
        if torch.cuda.is_current_stream_capturing():
            self._captured.append(table)  # each replay reads it
        return table.to(device, non_blocking=True)


def _log2(beta: float) -> float:
    return math.log2(beta) if beta else -math.inf
