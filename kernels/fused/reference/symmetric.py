"""Symmetric products of matrices in PyTorch: the reference for the kernel."""

import torch
from torch import Tensor


def symmetric_product(
    a: Tensor, b: Tensor, addend: Tensor | None = None,
    *, alpha: float = 1.0, beta: float = 0.0, gamma: float = 0.0,
) -> Tensor:  # fmt: skip
    """Compute alpha a b^T + beta addend + gamma I, which must be symmetric.

    Args:
        a: (B, M, K) fp16, bf16 or fp32, any strides.
        b: (B, M, K), same dtype.
        addend: (B, M, M), same dtype. None: zero.

    Returns:
        (B, M, M), same dtype.
    """
    if addend is None:
        out = torch.bmm(a, b.mT).mul_(alpha)
    else:
        out = torch.baddbmm(addend, a, b.mT, beta=beta, alpha=alpha)
    out.diagonal(dim1=-2, dim2=-1).add_(gamma)
    return out
