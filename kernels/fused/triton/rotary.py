"""RMSNorm and rotation of each query and key, forward and backward in one pass over memory each.

A program processes all heads of some tokens, so it loads their cosines and sines once. Each half of
a head is a tile of its own. Offsets are in elements; rows are tokens of the whole batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .sums import add_parts

TILE, MAX_ROWS, NUM_WARPS, NUM_STAGES = 1024, 64, 4, 3


@triton.jit
def load_angles(cos_ptr, sin_ptr, n_rows, n_positions, i, half: tl.constexpr, ROWS: tl.constexpr):
    """This program's rows, masks of rows and of elements, cosines and sines."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    rows = row < n_rows
    inside = rows & (i < half)[None, :]
    at = (row % n_positions).to(tl.int64) * half + i[None, :]  # offsets may exceed 32 bits
    cos = tl.load(cos_ptr + at, inside, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + at, inside, other=0.0).to(tl.float32)
    return row.to(tl.int64), rows, inside, cos, sin


@triton.jit
def load_halves(ptr, at, inside, half: tl.constexpr):
    """Both halves of a head of each row, as fp32."""
    first = tl.load(ptr + at, inside, other=0.0).to(tl.float32)
    return first, tl.load(ptr + at + half, inside, other=0.0).to(tl.float32)


@triton.jit
def store_halves(ptr, at, inside, half: tl.constexpr, first, second):
    """Write both halves of a head of each row."""
    tl.store(ptr + at, first.to(ptr.dtype.element_ty), inside)
    tl.store(ptr + at + half, second.to(ptr.dtype.element_ty), inside)


@triton.jit
def reciprocal_rms(first, second, rows, half: tl.constexpr, eps):
    """1 / root mean square of each row, (ROWS, 1); 0 beyond the last row, whose square may be 0."""
    squares = tl.sum(first * first + second * second, 1)
    return tl.where(rows, tl.rsqrt(squares / (2 * half) + eps)[:, None], 0.0)


@triton.jit
def load_weight(weight_ptr, i, half: tl.constexpr):
    """Both halves of a weight, fp32."""
    inside = i < half
    first = tl.load(weight_ptr + i, inside, other=0.0).to(tl.float32)
    second = tl.load(weight_ptr + half + i, inside, other=0.0).to(tl.float32)
    return first[None, :], second[None, :]


@triton.jit
def rotate_heads(
    x_ptr, x_at, y_ptr, y_at, n_heads, rows, inside, cos, sin, weight_ptr, i,
    half: tl.constexpr, eps, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Normalise, if there is a weight, and rotate the heads of some rows."""
    if weight_ptr is not None:
        first_weight, second_weight = load_weight(weight_ptr, i, half)
    for head in tl.range(0, n_heads, num_stages=NUM_STAGES):
        first, second = load_halves(x_ptr, x_at + head * 2 * half, inside, half)
        if weight_ptr is not None:
            scale = reciprocal_rms(first, second, rows, half, eps)
            first *= scale * first_weight
            second *= scale * second_weight
        one, two = first * cos - second * sin, second * cos + first * sin
        store_halves(y_ptr, y_at + head * 2 * half, inside, half, one, two)


@triton.jit
def rotary_kernel(
    qkv_ptr,  # (N, H + 2 H_kv, D)
    cos_ptr, sin_ptr,  # (n_positions, D/2); row r has position r % n_positions
    q_weight_ptr, k_weight_ptr,  # (D,); None: no norm
    q_ptr, k_ptr,  # (N, H, D) and (N, H_kv, D), written
    n_rows, n_positions, n_head, n_kv_head, eps,
    half: tl.constexpr,  # D/2
    ROWS: tl.constexpr, HALF: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, HALF)
    row, rows, inside, cos, sin = load_angles(cos_ptr, sin_ptr, n_rows, n_positions, i, half, ROWS)
    width = 2 * half
    x_at = row * ((n_head + 2 * n_kv_head) * width) + i[None, :]
    rotate_heads(
        qkv_ptr, x_at, q_ptr, row * (n_head * width) + i[None, :], n_head,
        rows, inside, cos, sin, q_weight_ptr, i, half, eps, NUM_STAGES,
    )  # fmt: skip
    rotate_heads(
        qkv_ptr, x_at + n_head * width, k_ptr, row * (n_kv_head * width) + i[None, :], n_kv_head,
        rows, inside, cos, sin, k_weight_ptr, i, half, eps, NUM_STAGES,
    )  # fmt: skip


@triton.jit
def rotate_heads_bwd(
    dy_ptr, dy_at, x_ptr, dx_ptr, x_at, n_heads, rows, inside, cos, sin, weight_ptr, sums_ptr, i,
    half: tl.constexpr, eps, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Gradient of `rotate_heads`; with a weight, also its sums over these rows."""
    if weight_ptr is not None:
        first_weight, second_weight = load_weight(weight_ptr, i, half)
        first_sum, second_sum = tl.zeros_like(cos), tl.zeros_like(cos)
    for head in tl.range(0, n_heads, num_stages=NUM_STAGES):
        one, two = load_halves(dy_ptr, dy_at + head * 2 * half, inside, half)
        first, second = one * cos + two * sin, two * cos - one * sin  # the inverse rotation
        if weight_ptr is not None:
            x_first, x_second = load_halves(x_ptr, x_at + head * 2 * half, inside, half)
            scale = reciprocal_rms(x_first, x_second, rows, half, eps)
            x_first *= scale
            x_second *= scale
            first_sum += first * x_first
            second_sum += second * x_second
            # Scaling a row does not change its norm, so remove this component of the gradient.
            first *= first_weight
            second *= second_weight
            along = tl.sum(first * x_first + second * x_second, 1)[:, None] / (2 * half)
            first = (first - x_first * along) * scale
            second = (second - x_second * along) * scale
        store_halves(dx_ptr, x_at + head * 2 * half, inside, half, first, second)
    if weight_ptr is not None:
        tl.store(sums_ptr + i, tl.sum(first_sum, 0), i < half)
        tl.store(sums_ptr + half + i, tl.sum(second_sum, 0), i < half)


@triton.jit
def rotary_bwd_kernel(
    dq_ptr, dk_ptr, dv_ptr,  # (N, H, D), (N, H_kv, D) twice
    qkv_ptr,  # (N, H + 2 H_kv, D); None without weights
    cos_ptr, sin_ptr,  # (n_positions, D/2)
    q_weight_ptr, k_weight_ptr,  # (D,); None: no norm
    dqkv_ptr,  # (N, H + 2 H_kv, D), written
    sums_ptr,  # (programs, 2, D) fp32, written if there are weights: of their gradients
    n_rows, n_positions, n_head, n_kv_head, eps,
    half: tl.constexpr,  # D/2
    ROWS: tl.constexpr, HALF: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, HALF)
    row, rows, inside, cos, sin = load_angles(cos_ptr, sin_ptr, n_rows, n_positions, i, half, ROWS)
    width = 2 * half
    x_at = row * ((n_head + 2 * n_kv_head) * width) + i[None, :]
    kv_at = row * (n_kv_head * width) + i[None, :]
    sums = sums_ptr + tl.program_id(0) * 2 * width
    rotate_heads_bwd(
        dq_ptr, row * (n_head * width) + i[None, :], qkv_ptr, dqkv_ptr, x_at, n_head,
        rows, inside, cos, sin, q_weight_ptr, sums, i, half, eps, NUM_STAGES,
    )  # fmt: skip
    x_at += n_head * width
    rotate_heads_bwd(
        dk_ptr, kv_at, qkv_ptr, dqkv_ptr, x_at, n_kv_head,
        rows, inside, cos, sin, k_weight_ptr, sums + width, i, half, eps, NUM_STAGES,
    )  # fmt: skip
    x_at += n_kv_head * width
    for head in tl.range(0, n_kv_head, num_stages=NUM_STAGES):
        first, second = load_halves(dv_ptr, kv_at + head * width, inside, half)
        store_halves(dqkv_ptr, x_at + head * width, inside, half, first, second)


def rotary_qkv(
    qkv: Tensor, cos: Tensor, sin: Tensor, q_weight: Tensor | None, k_weight: Tensor | None,
    n_kv_head: int, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Queries and keys of `kernels.rotary_qkv`; all tensors are contiguous."""
    B, T, n_heads, D = qkv.shape
    n_head = n_heads - 2 * n_kv_head
    q, k = qkv.new_empty(B, T, n_head, D), qkv.new_empty(B, T, n_kv_head, D)
    if n_rows := B * T:
        options = options_of(D)
        rotary_kernel[(triton.cdiv(n_rows, options["ROWS"]),)](
            qkv, cos, sin, q_weight, k_weight, q, k,
            n_rows, _n_positions(cos), n_head, n_kv_head, eps, **options,
            enable_fp_fusion=True,
        )  # fmt: skip
    return q, k


def rotary_qkv_bwd(
    dq: Tensor, dk: Tensor, dv: Tensor, qkv: Tensor | None, cos: Tensor, sin: Tensor,
    q_weight: Tensor | None, k_weight: Tensor | None, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradient of qkv, and sums (2, D) fp32: the gradients of the weights. 0 without weights."""
    B, T, n_head, D = dq.shape
    n_kv_head, n_rows = dk.shape[2], B * T
    dqkv = dq.new_empty(B, T, n_head + 2 * n_kv_head, D)
    options = options_of(D)
    n_programs = triton.cdiv(n_rows, options["ROWS"])
    if q_weight is None or n_rows == 0:
        sums = totals = cos.new_zeros(2, D, dtype=torch.float32)
    else:
        sums = cos.new_empty(n_programs, 2, D, dtype=torch.float32)
    if n_rows:
        rotary_bwd_kernel[(n_programs,)](
            dq, dk, dv, qkv, cos, sin, q_weight, k_weight, dqkv, sums,
            n_rows, _n_positions(cos), n_head, n_kv_head, eps, **options,
            enable_fp_fusion=True,
        )  # fmt: skip
        if q_weight is not None:
            totals = add_parts(sums.flatten(1)).view(2, D)
    return dqkv, totals


def _n_positions(cos: Tensor) -> int:
    """Rows of the tables, of which tables for each batch row have one for each token."""
    return cos.shape[:-1].numel()


def options_of(head_dim: int) -> dict[str, int]:
    """Constants and options of both kernels; the tiles of all head_dims have about one size."""
    half = head_dim // 2
    padded = triton.next_power_of_2(half)
    return {
        **{"half": half, "HALF": padded, "ROWS": max(1, min(MAX_ROWS, TILE // padded))},
        **{"NUM_STAGES": NUM_STAGES, "num_warps": NUM_WARPS},
    }
