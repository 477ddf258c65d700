"""Inputs and error budgets for attention, shared by tests and benchmarks.

The house rule is FlashAttention's: against the exact answer, a kernel may be at most a small factor
worse than plain PyTorch in the same dtype (tests/test_flash_attn.py of Dao-AILab/flash-attention).
"""

import functools
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
    batch: int,
    seq_q: int,
    seq_k: int,
    n_head: int,
    n_kv_head: int,
    head_dim: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    requires_grad: bool = False,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Random attention inputs: the same numbers on every device and, but for rounding, dtype.

    Args:
        requires_grad: make leaves that collect gradients.
        scale: standard deviation of q and k, whose scores then have scale^2. v keeps 1.

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
    """|actual - exact| / |exact| in the Frobenius norm; equal infinities do not count.

    0 where both are zero, inf where only `exact` is, NaN where `actual` holds a NaN.
    """
    error = _difference(actual, exact).norm().item()
    size = exact[exact.isfinite()].double().norm().item()
    if size == 0:
        return 0.0 if error == 0 else math.inf
    return error / size


def assert_within_budget(
    actual: Tensor,
    same_dtype: Tensor,
    exact: Tensor,
    *,
    factor: float,
    name: str,
    cancelled: float = 0.0,
    rounded: float = 0.0,
) -> None:
    """Assert max|actual - exact| <= factor * max|same_dtype - exact| + a rounding floor.

    Args:
        same_dtype: plain PyTorch's answer from the inputs of `actual` in their dtype.
        exact: the answer from these inputs in fp64 (or fp32).
        name: what the message calls it.
        cancelled: the largest magnitude that cancels on the way to `exact`, when it can be far
            larger than `exact` itself.
        rounded: what the rounding of an intermediate result may cost.

    Raises:
        AssertionError: the budget is exceeded, shapes differ, `actual` is NaN or infinite where
            `exact` is not, or `same_dtype` is, so that there is no budget. The message gives both
            errors and the budget.
    """
    assert actual.shape == exact.shape, f"{name}: shape {actual.shape}, expected {exact.shape}"
    error = _max_abs(_difference(actual, exact))
    same_dtype_error = _max_abs(_difference(same_dtype, exact))
    # Plain PyTorch is exact now and then (one key: out = v, dq = 0), which would leave no budget.
    # Rounding a result to its dtype costs up to eps / 2 of it; eps grants that twice, as `factor`
    # grants it twice where plain PyTorch has this error too. What cancels does so in the dtype of
    # the sums, and a few eps of it remain when they run in another order.
    sum_dtype = at_least_fp32(actual.dtype)
    floor = torch.finfo(actual.dtype).eps * _max_abs(exact[exact.isfinite()])
    floor += 4 * torch.finfo(sum_dtype).eps * cancelled + rounded
    budget = factor * same_dtype_error + floor
    assert error <= budget < math.inf, (
        f"{name}: max error {error:.3e} exceeds the budget {budget:.3e} = {factor:g} * "
        f"{same_dtype_error:.3e} (plain PyTorch in {same_dtype.dtype}) + {floor:.3e} (rounding)"
    )


def check_attention(
    fn: AttentionFunction,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    with_dlse: bool = False,
    backward: bool = True,
    exact_dtype: torch.dtype = torch.float64,
    seed: int = 0,
    **options: Any,
) -> dict[str, float]:
    """Hold an attention function to the error budget: out and lse, then dq, dk, dv and dsinks.

    out may have 2 times the error of same-dtype `standard_attention` and each gradient 3 times,
    all against `standard_attention` in `exact_dtype`. lse is held to 2 times the error of fp32,
    whatever the inputs' dtype: a kernel keeps its scores in fp32. Three gradients may also have the
    error of what a kernel keeps rounded and plain PyTorch keeps whole or not at all: dq and dsinks
    that of out, and dv that of lse, from which the backward makes the probabilities anew.

    Args:
        fn: called as fn(q, k, v, **options); returns out (B, T_q, H, D) and lse (B, H, T_q).
        q, k, v: (B, T_q, H, D) and (B, T_k, H_kv, D). Strides reach fn as they are; no grad is
            written to them.
        with_dlse: also send a random gradient through lse.
        backward: check the gradients.
        exact_dtype: fp64, or fp32 where fp64 is too slow or too large.
        seed: of the random output gradients.
        options: the keyword arguments of `standard_attention`.

    Returns:
        The relative error (norm ratio) of out, lse, dq, dk, dv and, with sinks, dsinks; and under
        "out_same_dtype" and so on that of plain PyTorch.

    Raises:
        AssertionError: a result has the wrong shape or dtype, or is over its budget.
    """
    generator = torch.Generator().manual_seed(seed)
    B, T_q, H, _ = q.shape
    dout = torch.randn(q.shape, generator=generator).to(q)
    dlse = torch.randn(B, H, T_q, generator=generator).to(q.device) if with_dlse else None
    sinks = options.get("sinks")

    def run(function: AttentionFunction, dtype: torch.dtype) -> dict[str, Tensor]:
        # .to() keeps strides, and detach() makes new leaves without copying
        leaves = {
            f"d{name}": x.detach().to(dtype).requires_grad_(backward)
            for name, x in (("q", q), ("k", k), ("v", v))
        }
        given = dict(options)
        if sinks is not None:
            leaves["dsinks"] = sinks.detach().to(at_least_fp32(dtype)).requires_grad_(backward)
            given["sinks"] = leaves["dsinks"]
        out, lse = function(leaves["dq"], leaves["dk"], leaves["dv"], **given)
        results = {"out": out.detach(), "lse": lse.detach()}
        if backward:
            outputs, grads = [out], [dout.to(out.dtype)]
            if dlse is not None:
                outputs, grads = [out, lse], [*grads, dlse.to(lse.dtype)]
            gradients = torch.autograd.grad(outputs, list(leaves.values()), grads)
            results |= zip(leaves, gradients, strict=True)
        return results

    actual = run(fn, q.dtype)
    same_dtype = run(standard_attention, q.dtype)
    exact = run(standard_attention, exact_dtype)
    sum_dtype = at_least_fp32(q.dtype)
    if sum_dtype != q.dtype:
        with torch.no_grad():
            same_dtype["lse"] = standard_attention(
                *(x.detach().to(sum_dtype) for x in (q, k, v)), **options
            )[1]

    scale = options.get("softmax_scale") or 1 / math.sqrt(q.shape[-1])
    cancelled = _cancelled_magnitudes(q, k, v, dout, dlse, scale, sinks)
    delta_error = _rounding_of_delta(q.dtype, dout, exact["out"])
    rounded = {
        "dv": _rounding_of_lse(sum_dtype, dout, exact["lse"]),
        # of a query that looks at one key alone, where plain PyTorch's dp - delta is 0
        "dq": scale * _max_abs(k) * _max_abs(delta_error),
    }
    if sinks is not None:
        p = (sinks[:, None] - finite(exact["lse"])).exp()
        rounded["dsinks"] = _max_abs((p * delta_error).square().sum(dim=(0, 2)).sqrt())
    factors = {"out": 2.0, "lse": 2.0, "dq": 3.0, "dk": 3.0, "dv": 3.0, "dsinks": 3.0}
    errors = {}
    for name, value in actual.items():
        expected_dtype = sum_dtype if name in ("lse", "dsinks") else q.dtype
        assert value.dtype == expected_dtype, f"{name}: {value.dtype}, expected {expected_dtype}"
        assert_within_budget(
            value,
            same_dtype[name],
            exact[name],
            factor=factors[name],
            name=name,
            cancelled=cancelled.get(name, 0.0),
            rounded=rounded.get(name, 0.0),
        )
        errors[name] = relative_error(value, exact[name])
        errors[f"{name}_same_dtype"] = relative_error(same_dtype[name], exact[name])
    return errors


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums over values of `dtype`: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


@contextmanager
def poison_empty() -> Iterator[None]:
    """Within the block, uninitialised tensors hold NaN, so that an unwritten result shows.

    Covers torch.empty, empty_like and empty_strided, and Tensor.new_empty. Integer and bool tensors
    are left as they come.
    """

    def poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(allocate)
        def allocate_nan(*args: object, **kwargs: object) -> Tensor:
            x = allocate(*args, **kwargs)
            if x.is_floating_point():
                x.detach().fill_(math.nan)  # detach: leaves that require grad refuse it
            return x

        return allocate_nan

    allocators = [(torch, "empty"), (torch, "empty_like"), (torch, "empty_strided")]
    with ExitStack() as patches:
        for owner, name in (*allocators, (Tensor, "new_empty")):
            patches.enter_context(mock.patch.object(owner, name, poisoned(getattr(owner, name))))
        yield


def _cancelled_magnitudes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    scale: float,
    sinks: Tensor | None,
) -> dict[str, float]:
    """What cancels on the way to each result of attention, for `assert_within_budget`.

    lse is a maximal score plus a logarithm. dq and dk are sums over p * (dp - delta): with few keys
    dp and delta are nearly equal, and with one they are equal, whatever their size. dsinks sums
    p * delta over all queries of a head.
    """
    B, T_q, H, _ = q.shape
    # Cauchy-Schwarz, rather than another (T_q, T_k) matrix
    score = scale * _max_norm(q) * _max_norm(k)
    if sinks is not None:
        score = max(score, _max_abs(finite(sinks)))
    dp = _max_norm(dout) * _max_norm(v) + (0.0 if dlse is None else _max_abs(dlse))
    # a row of P sums to 1; a column may sum to the number of queries, whose errors are independent
    queries = T_q * (H // k.shape[2])
    return {
        "lse": 1.0 + score,
        "dq": scale * dp * _max_abs(k),
        "dk": scale * dp * _max_abs(q) * math.sqrt(queries),
        "dsinks": dp * math.sqrt(B * T_q),
    }


def _rounding_of_lse(dtype: torch.dtype, dout: Tensor, lse: Tensor) -> float:
    """What rounding lse to `dtype` may cost dv, a sum over the products p * dout of a key.

    A kernel takes powers of 2, but gives lse as a natural logarithm: made anew, exp(score - lse) is
    off by eps / 2 of lse, as by that of score, also where a query looks at one key alone and plain
    PyTorch's p is 1. Twice their sum, for a key may have several such queries.
    """
    return 2 * torch.finfo(dtype).eps * _max_abs(lse[lse.isfinite()]) * _max_abs(dout)


def _rounding_of_delta(dtype: torch.dtype, dout: Tensor, out: Tensor) -> Tensor:
    """What rounding out to `dtype` may cost delta, the sum of dout * out of a query: (B, H, T_q).

    Each product is off by at most eps / 2 of itself, evenly spread and independent of the others:
    eps times the root of their sum of squares is 3.5 standard deviations.
    """
    products = (dout * out).nan_to_num().double()
    return torch.finfo(dtype).eps * products.square().sum(-1).sqrt().transpose(1, 2)


def _difference(actual: Tensor, exact: Tensor) -> Tensor:
    """actual - exact in fp64, 0 where they are equal, as two infinities may be."""
    actual, exact = actual.detach().double(), exact.detach().double()
    return torch.where(actual == exact, 0.0, actual - exact)


def _max_abs(x: Tensor) -> float:
    return x.detach().abs().amax().item() if x.numel() else 0.0


def _max_norm(x: Tensor) -> float:
    """The largest Euclidean norm of a head's vector."""
    return _max_abs(x.detach().double().norm(dim=-1))
