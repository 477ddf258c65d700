"""Orthogonalization of matrices by Newton-Schulz iterations, for Muon."""

import torch
from torch import Tensor

from kernels.fused.dispatch import module_of

COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""a, b, c of a s + b s^3 + c s^5, which an iteration applies to each singular value s, by Jordan et
al. 2024."""
ITERATIONS = 5
_AT_ONCE = 3
"""Iterations before G is computed from y again."""
_EPS = 1e-7


def orthogonalize(x: Tensor, impl: str = "reference", dtype: torch.dtype | None = None) -> Tensor:
    """Approximate U V^T of the singular value decomposition x = U S V^T.

    An iteration multiplies y, at first x divided by its norm, by p = a I + b G + c G^2, where
    G = y y^T. All p are polynomials of the first G, so they and G are symmetric and commute. They
    are multiplied before y is, and half of each product is computed, as by Zhang et al. 2026 (Gram
    Newton-Schulz). Rounding errors in the small eigenvalues of G grow with every iteration, so G is
    computed from y again after some of them.

    In fp16, matrices with singular values from 1 to 1e-6 end with an error of about 1%; in the
    usual iteration in bf16 it is 9% to 14%.

    Args:
        x: (B, M, N), floating.
        impl: "reference" or "triton", which needs a GPU or Triton's interpreter.
        dtype: of the products; by default fp16, and fp32 on a CPU.

    Returns:
        (B, M, N) in this dtype.
    """
    dtype = dtype or (torch.float16 if x.is_cuda else torch.float32)
    tall = x.shape[-2] > x.shape[-1]
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.float32)
    y = torch.mul(x, 1 / norm.clamp(min=_EPS), out=torch.empty_like(x, dtype=dtype))
    for first in range(0, ITERATIONS, _AT_ONCE):
        n_iterations = min(_AT_ONCE, ITERATIONS - first)
        factor = _product(y.mT if tall else y, n_iterations, impl)
        y = y @ factor if tall else factor @ y
    return y


def _product(y: Tensor, n_iterations: int, impl: str) -> Tensor:
    """Product of the p of some iterations, (B, M, M), for y (B, M, N)."""
    multiply = module_of(impl, "symmetric").symmetric_product
    a, b, c = COEFFICIENTS
    gram, product = multiply(y, y), None
    for last in (*[False] * (n_iterations - 1), True):
        p = multiply(gram, gram, gram, alpha=c, beta=b, gamma=a)
        product = p if product is None else multiply(p, product)
        if not last:
            gram = multiply(multiply(p, gram), p)
    assert product is not None, "at least one iteration"
    return product
