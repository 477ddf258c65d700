"""Correctness check of experiments.attention: only correct results are timed.

The check compares out, dq, dk and dv with an exact answer, computed in fp64 from the same tensors
for the first and the last head of the batch. The relative error (Frobenius norm) must be at most 3
times that of plain PyTorch in the case's dtype, plus a quarter of that dtype's epsilon, about the
cost of rounding the result. NaN and infinity fail. An approximation of attention passes if its
results are finite; their errors are recorded. The dropout mask of PyTorch cannot be queried, so its
attention is checked without dropout. Papilio's is checked with its mask, for the first head, up to
DROPOUT_CHECK_LIMIT tokens.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from experiments.attention.cases import DROPOUT_SEED, Attention, Case, Tensors
from kernels.reference.standard import dropout_keep_mask
from kernels.testing import relative_error

RESULTS = ("out", "dq", "dk", "dv")
ANY_FINITE: dict[str, float] = dict.fromkeys(RESULTS, sys.float_info.max)
"""Error budgets of an approximation."""
DROPOUT_CHECK_LIMIT = 16_384  # tokens; the mask of a head is T x T int64


@dataclass(frozen=True)
class Answer:
    """Expected results of a case: exact values of some heads, and error budgets."""

    heads: list[tuple[int, int]]  # (batch, head)
    exact: dict[str, Tensor]  # of RESULTS, (heads, T, D) fp64
    budgets: dict[str, float]  # relative errors


def visible_keys(case: Case, rows: slice, batch: int, device: torch.device | str) -> Tensor:
    """Keys visible to the queries of `rows`, without dropout: (rows, T) bool."""
    query = torch.arange(rows.start, rows.stop, device=device).unsqueeze(1)
    key = torch.arange(case.seq_len, device=device)
    visible = (key < case.kv_lengths(device)[batch]).expand(query.shape[0], -1)
    if case.causal:
        visible = visible & (key <= query)
    if case.document is not None:
        visible = visible & (key // case.document == query // case.document)
    if case.sparsity is not None:
        layout = case.sparsity.mask(case.seq_len, device).layout[0]
        size = case.sparsity.block_size
        visible = visible & layout[query // size, key // size]
    return visible


def head_attention(
    head: Tensors,
    visible: Callable[[slice], Tensor],
    *,
    factor: Tensor | None = None,
    scores_per_chunk: int = 2**25,
) -> dict[str, Tensor]:
    """Attention of one head in plain PyTorch, in the dtype of its inputs, in chunks of rows.

    Args:
        head: q, k, v and dout, (T, D).
        visible: returns the keys visible to a slice of the queries, (rows, T) bool, at least one
            per row.
        factor: (T, T) dropout factor of the probabilities.
        scores_per_chunk: number of scores to compute at a time.

    Returns:
        RESULTS, (T, D) each. dk and dv are sums over the chunks, in fp32 or fp64.
    """
    q, k, v, dout = (x.detach() for x in head)
    T, D = q.shape
    sum_dtype = torch.promote_types(q.dtype, torch.float32)
    dk, dv = (torch.zeros_like(x, dtype=sum_dtype) for x in (k, v))
    k.requires_grad_()
    v.requires_grad_()
    outs, dqs = [], []
    step = max(1, scores_per_chunk // T)
    for start in range(0, T, step):
        rows = slice(start, min(start + step, T))
        q_rows = q[rows].requires_grad_()
        scores = ((q_rows * D**-0.5) @ k.mT).to(sum_dtype)
        p = scores.masked_fill(~visible(rows), -math.inf).softmax(-1).to(q.dtype)
        if factor is not None:
            p = p * factor[rows].to(p.dtype)
        out = p @ v
        dq_rows, dk_rows, dv_rows = torch.autograd.grad(out, (q_rows, k, v), dout[rows])
        outs.append(out.detach())
        dqs.append(dq_rows)
        dk += dk_rows
        dv += dv_rows
    return {"out": torch.cat(outs), "dq": torch.cat(dqs), "dk": dk, "dv": dv}


def answer(case: Case, tensors: Tensors) -> Answer:
    """Compute the exact answer to `case`, and the errors that its dtype allows."""
    heads = [(0, 0), (case.batch - 1, case.n_head - 1)]
    factor = None
    if case.dropout_p > 0:
        heads = heads[:1]  # the only one whose mask does not depend on the batch size
        sizes = {"batch": 1, "n_head": 1, "seq_q": case.seq_len, "seq_k": case.seq_len}
        device = tensors.q.device
        keep = dropout_keep_mask(DROPOUT_SEED, **sizes, dropout_p=case.dropout_p, device=device)
        factor = keep[0, 0].float() / (1 - case.dropout_p)

    def compute(dtype: torch.dtype) -> dict[str, Tensor]:
        by_head = []
        for b, h in heads:
            visible = partial(visible_keys, case, batch=b, device=tensors.q.device)
            head = Tensors(*(x[b, :, h].detach().to(dtype) for x in tensors))
            by_head.append(head_attention(head, visible, factor=factor))
        return {name: torch.stack([x[name] for x in by_head]) for name in RESULTS}

    exact, same_dtype = compute(torch.float64), compute(case.dtype)
    floor = torch.finfo(case.dtype).eps / 4
    budgets = {n: 3 * relative_error(same_dtype[n], exact[n]) + floor for n in RESULTS}
    return Answer(heads, exact, budgets)


def checked_case(name: str, case: Case) -> Case:
    """Case on which a contender is checked: without dropout if its mask is unknown."""
    known = name.startswith("ours") and case.seq_len <= DROPOUT_CHECK_LIMIT
    return case if known else replace(case, dropout_p=0.0)


def errors(attention: Attention, tensors: Tensors, expected: Answer) -> dict[str, float]:
    """Relative errors of a contender's out, dq, dk and dv."""
    q, k, v, dout = tensors
    out = attention(q, k, v)
    results = (out.detach(), *torch.autograd.grad(out, (q, k, v), dout))
    return {
        name: relative_error(
            torch.stack([x[b, :, h] for b, h in expected.heads]), expected.exact[name]
        )
        for name, x in zip(RESULTS, results, strict=True)
    }


def verdict(measured: dict[str, float], budgets: dict[str, float]) -> str:
    """Status of a result: "ok", or the errors that exceed their budgets. Any NaN fails."""
    wrong = [n for n in RESULTS if not measured[n] <= budgets[n] < math.inf]
    if not wrong:
        return "ok"
    listed = ", ".join(f"{measured[n]:.1e} of {n} (allowed {budgets[n]:.1e})" for n in wrong)
    return f"wrong: error {listed}"
