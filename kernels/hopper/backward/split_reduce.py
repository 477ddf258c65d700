"""Split-reduce kernel of the backward pass: add up dk and dv of the split columns of a mask."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ROWS = gl.constexpr(16)  # keys per program


@gluon.jit
def attn_bwd_split_reduce_kernel(
    splits_ptr, cuts_ptr, dk_ptr, dv_ptr, dk_batch, dk_token, dk_head, dv_batch, dv_token, dv_head,
    seq_k, head_dim, n_head, n_heads, plan: gl.constexpr,
):  # fmt: skip
    """Add up the splits of dk or dv, for ROWS keys of a split column in each program.

    Programs are (cuts, n_heads, 2, plan.block / ROWS), dk before dv. splits is (splits, n_heads, 2,
    plan.block, D) fp32, where n_heads counts the heads of all batches; cuts (n, 3) is as in
    `kernels.mask.lists.MaskLists`.
    """
    D: gl.constexpr = plan.block_d
    PARTS: gl.constexpr = plan.block // ROWS
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [128 // D, D // 4], [4, 1], [1, 0])
    part = gl.program_id(0) % PARTS
    which = gl.program_id(0) // PARTS % 2
    batch_head = gl.program_id(0) // (2 * PARTS) % n_heads
    cut = cuts_ptr + gl.program_id(0) // (2 * PARTS * n_heads) * 3
    row = part * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    d = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, layout)), 0)
    key = gl.load(cut) * plan.block + row
    inside = gl.expand_dims(key < seq_k, 1) & (d < head_dim)
    # Always in the order of their rows, so that gradients repeat bit for bit.
    total = gl.zeros([ROWS, D], gl.float32, layout=layout)
    for split in range(gl.load(cut + 1), gl.load(cut + 2)):
        tile = ((split * n_heads + batch_head) * 2 + which).to(gl.int64)
        at = splits_ptr + tile * (plan.block * D) + gl.expand_dims(row, 1) * D + d
        total += gl.load(at, mask=inside, other=0.0)
    batch = (batch_head // n_head).to(gl.int64)
    head = (batch_head % n_head).to(gl.int64)
    key = gl.expand_dims(key, 1).to(gl.int64)
    if which == 0:
        to = dk_ptr + batch * dk_batch + head * dk_head + key * dk_token + d
        gl.store(to, total.to(dk_ptr.dtype.element_ty), mask=inside)
    else:
        to = dv_ptr + batch * dv_batch + head * dv_head + key * dv_token + d
        gl.store(to, total.to(dv_ptr.dtype.element_ty), mask=inside)
