"""Inputs and error budgets for attention, shared by tests and benchmarks.

The rule is FlashAttention's (tests/test_flash_attn.py of Dao-AILab/flash-attention): the error of a
kernel, against the exact answer, may be a small factor times that of PyTorch in the same dtype.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from .reference.standard import finite, standard_attention

AttentionFunction = Callable[..., tuple[Tensor, Tensor]]


def make_qkv(
    batch: int, seq_q: int, seq_k: int, n_head: int, n_kv_head: int, head_dim: int, *,
    dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", seed: int = 0,
    requires_grad: bool = False, scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Random attention inputs: the same numbers on every device and, up to rounding, in any dtype.

    Args:
        requires_grad: make leaves that collect gradients.
        scale: standard deviation of q and k; scores then have scale^2. v keeps 1.

    Returns:
        q (batch, seq_q, n_head, head_dim), k and v (batch, seq_k, n_kv_head, head_dim), contiguous.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(seq_len: int, heads: int, std: float) -> Tensor:
        x = torch.randn(batch, seq_len, heads, head_dim, generator=generator, dtype=torch.float64)
        return (x * std).to(device, dtype).requires_grad_(requires_grad)

    q, k = normal(seq_q, n_head, scale), normal(seq_k, n_kv_head, scale)
    return q, k, normal(seq_k, n_kv_head, 1.0)


def relative_error(actual: Tensor, exact: Tensor) -> float:
    """|actual - exact| / |exact| in the Frobenius norm; equal infinities are ignored.

    0 if both are zero, inf if only `exact` is, NaN if `actual` holds a NaN.
    """
    error = _difference(actual, exact).norm().item()
    size = exact[exact.isfinite()].double().norm().item()
    if size == 0:
        return 0.0 if error == 0 else math.inf
    return error / size


def assert_within_budget(
    actual: Tensor, same_dtype: Tensor, exact: Tensor, *, factor: float, name: str,
    cancelled: float = 0.0, rounded: float = 0.0,
) -> None:  # fmt: skip
    """Assert max|actual - exact| <= factor * max|same_dtype - exact| + a rounding floor.

    Args:
        same_dtype: PyTorch's result for the same inputs in the same dtype.
        exact: the result for these inputs in fp64 (or fp32).
        name: of the result, for the message.
        cancelled: largest magnitude that cancels in the computation of `exact`, if it can be far
            larger than `exact` itself.
        rounded: error that the rounding of an intermediate result may cause.

    Raises:
        AssertionError: the budget is exceeded, shapes differ, `actual` is NaN or infinite where
            `exact` is not, or `same_dtype` is, so that there is no budget. The message gives both
            errors and the budget.
    """
    assert actual.shape == exact.shape, f"{name}: shape {actual.shape}, expected {exact.shape}"
    error = _max_abs(_difference(actual, exact))
    same_dtype_error = _max_abs(_difference(same_dtype, exact))
    # PyTorch is sometimes exact (one key: out = v, dq = 0), which would leave no budget. Rounding a
    # result to its dtype costs up to eps / 2 of it. The floor allows twice that, as `factor` does
    # where PyTorch has this error also. Terms that cancel do so in the dtype of the sums; summed in
    # another order, they leave a few eps.
    sum_dtype = at_least_fp32(actual.dtype)
    floor = torch.finfo(actual.dtype).eps * _max_abs(exact[exact.isfinite()])
    floor += 4 * torch.finfo(sum_dtype).eps * cancelled + rounded
    budget = factor * same_dtype_error + floor
    assert error <= budget < math.inf, (
        f"{name}: max error {error:.3e} exceeds the budget {budget:.3e} = {factor:g} * "
        f"{same_dtype_error:.3e} (plain PyTorch in {same_dtype.dtype}) + {floor:.3e} (rounding)"
    )


def check_attention(
    fn: AttentionFunction, q: Tensor, k: Tensor, v: Tensor, *, with_dlse: bool = False,
    backward: bool = True, exact_dtype: torch.dtype = torch.float64, seed: int = 0,
    **options: Any,
) -> dict[str, float]:  # fmt: skip
    """Check an attention function against the error budget: out, lse, dq, dk, dv and dsinks.

    Against `standard_attention` in `exact_dtype`, out may have 2 times and each gradient 3 times
    the error of `standard_attention` in the same dtype. lse may have 2 times the error of fp32 for
    any dtype of the inputs, because kernels keep scores in fp32. Kernels store out and lse rounded,
    where PyTorch does not round, so some gradients may have their error as well: dq and dsinks that
    of out, and dv that of lse, from which the backward recomputes the probabilities.

    Args:
        fn: called as fn(q, k, v, **options); returns out (B, T_q, H, D) and lse (B, H, T_q).
        q, k, v: (B, T_q, H, D) and (B, T_k, H_kv, D). Strides are kept; no grad is written.
        with_dlse: also send a random gradient through lse.
        backward: check the gradients.
        exact_dtype: fp64, or fp32 where fp64 is too slow or too large.
        seed: of the random output gradients.
        options: the keyword arguments of `standard_attention`.

    Returns:
        Relative errors (norm ratio) of out, lse, dq, dk, dv and, with sinks, dsinks; PyTorch's are
        under "out_same_dtype" and so on.

    Raises:
        AssertionError: a result has the wrong shape or dtype, or exceeds its budget.
    """
    generator = torch.Generator().manual_seed(seed)
    B, T_q, H, _ = q.shape
    dout = torch.randn(q.shape, generator=generator).to(q)
    dlse = torch.randn(B, H, T_q, generator=generator).to(q.device) if with_dlse else None
    sinks = options.get("sinks")

    def run(function: AttentionFunction, dtype: torch.dtype) -> dict[str, Tensor]:
        # .to() keeps strides, and detach() makes new leaves without a copy.
        leaves = {
            f"d{name}": x.detach().to(dtype).requires_grad_(backward)
            for name, x in (("q", q), ("k", k), ("v", v))
        }
        keywords = dict(options)
        if sinks is not None:
            leaves["dsinks"] = sinks.detach().to(at_least_fp32(dtype)).requires_grad_(backward)
            keywords["sinks"] = leaves["dsinks"]
        out, lse = function(leaves["dq"], leaves["dk"], leaves["dv"], **keywords)
        results = {"out": out.detach(), "lse": lse.detach()}
        if backward:
            outputs = [(out, dout)] if dlse is None else [(out, dout), (lse, dlse)]
            tensors, grads = zip(*((x, dx.to(x.dtype)) for x, dx in outputs), strict=True)
            gradients = torch.autograd.grad(tensors, list(leaves.values()), grads)
            results |= zip(leaves, gradients, strict=True)
        return results

    actual, same_dtype = run(fn, q.dtype), run(standard_attention, q.dtype)
    exact, sum_dtype = run(standard_attention, exact_dtype), at_least_fp32(q.dtype)
    if sum_dtype != q.dtype:
        with torch.no_grad():
            wide = [x.detach().to(sum_dtype) for x in (q, k, v)]
            _, same_dtype["lse"] = standard_attention(*wide, **options)

    scale = options.get("softmax_scale") or 1 / math.sqrt(q.shape[-1])
    cancelled = _cancelled_magnitudes(q, k, v, dout, dlse, scale, sinks)
    delta_error = _rounding_of_delta(q.dtype, dout, exact["out"])
    # dq: of a query that sees only one key, where PyTorch's dp - delta is exactly 0.
    rounded = {"dq": scale * _max_abs(k) * _max_abs(delta_error)}
    rounded["dv"] = _rounding_of_lse(sum_dtype, dout, exact["lse"])
    if sinks is not None:
        p = (sinks[:, None] - finite(exact["lse"])).exp()
        rounded["dsinks"] = _max_abs((p * delta_error).square().sum(dim=(0, 2)).sqrt())
    errors = {}
    for name, value in actual.items():
        expected_dtype = sum_dtype if name in ("lse", "dsinks") else q.dtype
        assert value.dtype == expected_dtype, f"{name}: {value.dtype}, expected {expected_dtype}"
        assert_within_budget(
            value, same_dtype[name], exact[name], factor=2.0 if name in ("out", "lse") else 3.0,
            name=name, cancelled=cancelled.get(name, 0.0), rounded=rounded.get(name, 0.0),
        )  # fmt: skip
        errors[name] = relative_error(value, exact[name])
        errors[f"{name}_same_dtype"] = relative_error(same_dtype[name], exact[name])
    return errors


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """Dtype of sums over values of `dtype`: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


@contextmanager
def poison_empty() -> Iterator[None]:
    """Fill uninitialised tensors with NaN within the block, so that unwritten results show.

    Covers torch.empty, empty_like and empty_strided, and Tensor.new_empty. Integer and bool tensors
    are unchanged.
    """

    def poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocate_nan(*args: object, **kwargs: object) -> Tensor:
            x = allocate(*args, **kwargs)
            if x.is_floating_point():
                x.detach().fill_(math.nan)  # detach: leaves that require grad refuse it
            return x

        return allocate_nan

    with ExitStack() as patches:
        for name in ("empty", "empty_like", "empty_strided", "new_empty"):
            owner = Tensor if name == "new_empty" else torch
            patches.enter_context(mock.patch.object(owner, name, poisoned(getattr(owner, name))))
        yield


def _cancelled_magnitudes(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None, scale: float,
    sinks: Tensor | None,
) -> dict[str, float]:  # fmt: skip
    """Largest magnitude that cancels in each result of attention, for `assert_within_budget`.

    lse is a maximal score plus a logarithm. dq and dk are sums over p * (dp - delta): with few keys
    dp and delta are nearly equal, and with one key equal, whatever their size. dsinks sums
    p * delta over all queries of a head.
    """
    B, T_q, H, _ = q.shape
    # Bounded by Cauchy-Schwarz, without another (T_q, T_k) matrix.
    score = scale * _max_norm(q) * _max_norm(k)
    if sinks is not None:
        score = max(score, _max_abs(finite(sinks)))
    dp = _max_norm(dout) * _max_norm(v) + (0.0 if dlse is None else _max_abs(dlse))
    # A row of P sums to 1; a column sums to at most the number of queries, with independent errors.
    queries = T_q * (H // k.shape[2])
    return {
        "lse": 1.0 + score,
        "dq": scale * dp * _max_abs(k),
        "dk": scale * dp * _max_abs(q) * math.sqrt(queries),
        "dsinks": dp * math.sqrt(B * T_q),
    }


def _rounding_of_lse(dtype: torch.dtype, dout: Tensor, lse: Tensor) -> float:
    """Error that rounding lse to `dtype` may cause in dv, a sum of p * dout over queries.

    A kernel computes powers of 2 but returns lse as a natural logarithm. The recomputed
    exp(score - lse) is off by eps / 2 of lse and of score, even where a query sees only one key and
    PyTorch's p is exactly 1. Twice their sum, because a key may have several such queries.
    """
    return 2 * torch.finfo(dtype).eps * _max_abs(lse[lse.isfinite()]) * _max_abs(dout)


def _rounding_of_delta(dtype: torch.dtype, dout: Tensor, out: Tensor) -> Tensor:
    """Error (B, H, T_q) that rounding out to `dtype` may cause in delta, the sum of dout * out.

    Each product is off by at most eps / 2 of itself, evenly spread and independent of the others:
    eps times the root of their sum of squares is 3.5 standard deviations.
    """
    products = (dout * out).nan_to_num().double()
    return torch.finfo(dtype).eps * products.square().sum(-1).sqrt().transpose(1, 2)


def _difference(actual: Tensor, exact: Tensor) -> Tensor:
    """actual - exact in fp64; 0 where they are equal, which two infinities can be."""
    actual, exact = actual.detach().double(), exact.detach().double()
    return torch.where(actual == exact, 0.0, actual - exact)


def _max_abs(x: Tensor) -> float:
    return x.detach().abs().amax().item() if x.numel() else 0.0


def _max_norm(x: Tensor) -> float:
    """Largest Euclidean norm of a head's vector."""
    return _max_abs(x.detach().double().norm(dim=-1))
