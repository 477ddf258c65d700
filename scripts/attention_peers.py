"""What scripts/benchmark_attention.py is made of: problems, contenders, their check, their times.

A contender is a function of q, k and v (B, T, H, D) that returns out of the same shape. All
contenders of a case get the same tensors, and a result is timed only if it is right.

The rule: out, dq, dk and dv are compared with an exact answer, computed in fp64 from the same
tensors for the first and the last head of the batch. Their relative error (Frobenius norm) may be
at most 3 times that of plain PyTorch in the contender's dtype, and a quarter of that dtype's
epsilon more, about what rounding the result costs. No NaN and no infinity passes. Dropout of
PyTorch draws from a generator that cannot be asked, so it is checked with dropout off; ours is
checked with its mask up to DROPOUT_CHECK_LIMIT tokens, for the first head.

Letters in shapes: B batch, T tokens, H heads, D head_dim.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from kernels import flash_attention
from kernels.block_mask import BlockSparseMask
from kernels.patterns import butterfly, sliding_window
from kernels.reference import dropout_keep_mask
from kernels.testing import relative_error

RESULTS = ("out", "dq", "dk", "dv")
DROPOUT_SEED = 1
DROPOUT_CHECK_LIMIT = 16_384  # tokens; the mask of a head is made in int64, T x T
LONG_MS = 20.0  # a run this long is timed three times; shorter ones for a tenth of a second

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class UnsupportedError(Exception):
    """A contender that cannot run this case here; the message says why."""


@dataclass(frozen=True)
class Sparsity:
    """A block-sparse mask: `reach` is n_factors of a butterfly (None: all), or a window's width."""

    pattern: Literal["butterfly", "window"]
    reach: int | None = None
    block_size: int = 128

    def mask(self, seq_len: int, device: torch.device | str = "cpu") -> BlockSparseMask:
        """The mask for seq_len tokens."""
        n_blocks = -(-seq_len // self.block_size)
        if self.pattern == "butterfly":
            layout = butterfly(n_blocks, n_factors=self.reach, device=device)
        else:
            layout = sliding_window(n_blocks, self.reach or 1, device=device)
        return BlockSparseMask(layout, self.block_size)

    def __str__(self) -> str:
        return self.pattern if self.reach is None else f"{self.pattern} {self.reach}"


@dataclass(frozen=True)
class Case:
    """One attention problem. `padded`: each sequence has T - 20 to T keys, as in the paper."""

    batch: int
    seq_len: int
    n_head: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    causal: bool = False
    dropout_p: float = 0.0
    padded: bool = False
    sparsity: Sparsity | None = None

    @cached_property
    def density(self) -> float:
        """The share of the pairs of query and key that the block-sparse mask leaves."""
        if self.sparsity is None:
            return 1.0
        mask = self.sparsity.mask(self.seq_len)
        return mask.density(self.seq_len, self.seq_len, causal=self.causal)

    @property
    def forward_flops(self) -> float:
        """4 B H T^2 D, half of it if causal, times the density; the backward has 2.5 times it."""
        full = 4 * self.batch * self.n_head * self.seq_len**2 * self.head_dim
        return full * (0.5 if self.causal else 1.0) * self.density

    def kv_lengths(self, device: torch.device | str) -> Tensor:
        """(B,) int32, how many keys each sequence has; T where there is no padding."""
        shortest = max(1, self.seq_len - 20) if self.padded else self.seq_len
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(shortest, self.seq_len + 1, (self.batch,), generator=generator)
        return lengths.int().to(device)

    def describe(self) -> dict[str, Any]:
        """The case as a row of a result holds it."""
        return {
            **asdict(self),
            "dtype": str(self.dtype).removeprefix("torch."),
            "mask": str(self.sparsity or "dense"),
            "density": self.density,
        }


class Tensors(NamedTuple):
    """What a contender is run on, (B, T, H, D) each; q, k and v collect gradients."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


def make_tensors(case: Case, device: torch.device | str = "cuda") -> Tensors:
    """Normal random numbers, drawn on the device: the CPU would take a minute for 64K tokens."""
    generator = torch.Generator(device=device).manual_seed(0)
    shape = (case.batch, case.seq_len, case.n_head, case.head_dim)
    q, k, v, dout = (
        torch.randn(shape, generator=generator, device=device, dtype=case.dtype) for _ in range(4)
    )
    return Tensors(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout)


# ---- contenders


def padding_mask(case: Case, device: torch.device) -> Tensor | None:
    """(B, 1, 1, T) bool, True where there is a key; None without padding."""
    if not case.padded:
        return None
    keys = torch.arange(case.seq_len, device=device)
    return (keys < case.kv_lengths(device).unsqueeze(1))[:, None, None]


def ours(case: Case, device: torch.device) -> Attention:
    """This project's Triton kernels."""
    options: dict[str, Any] = {"causal": case.causal}
    if case.sparsity is not None:
        options["mask"] = case.sparsity.mask(case.seq_len, device)
    if case.padded:
        options["kv_lengths"] = case.kv_lengths(device)
    if case.dropout_p > 0:
        options["dropout_p"] = case.dropout_p
        options["dropout_seed"] = torch.tensor([DROPOUT_SEED], device=device)
    return partial(flash_attention, impl="triton", **options)


def standard(case: Case, device: torch.device) -> Attention:
    """Plain PyTorch with the T x T matrix in memory, in case.dtype: Algorithm 0 of the paper."""
    assert not case.causal, "nothing here compares standard attention with a causal mask"
    padding = padding_mask(case, device)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (q * case.head_dim**-0.5).transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        x = q @ k.mT  # one name for scores and probabilities, so that unneeded ones are freed
        if padding is not None:
            x = x.masked_fill(~padding, -math.inf)
        x = x.softmax(-1)
        if case.dropout_p > 0:
            x = F.dropout(x, case.dropout_p)
        return (x @ v).transpose(1, 2)

    return attend


def sdpa(backend: SDPBackend, case: Case, device: torch.device) -> Attention:
    """PyTorch's scaled_dot_product_attention on one backend, on transposed views."""
    padding = padding_mask(case, device)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        try:
            with sdpa_kernel(backend):
                out = F.scaled_dot_product_attention(
                    q.transpose(1, 2),
                    k.transpose(1, 2),
                    v.transpose(1, 2),
                    attn_mask=padding,
                    dropout_p=case.dropout_p,
                    is_causal=case.causal,
                )
        except RuntimeError as error:
            # What it says on a GPU, and what it says on a CPU.
            if not any(x in str(error) for x in ("No available kernel", "No viable backend")):
                raise
            raise UnsupportedError("PyTorch has no such kernel") from error
        return out.transpose(1, 2)

    return attend


def flex(case: Case, device: torch.device) -> Attention:
    """PyTorch's compiled FlexAttention, with a block mask for causal and for sparse attention."""
    # Past a few recompilations PyTorch would run it uncompiled. A saved forward is run backward
    # many times here, which buffers that the backward gives away do not survive.
    torch._dynamo.reset()
    functorch_config.donated_buffer = False
    mask = None
    if case.sparsity is not None:
        ours = case.sparsity.mask(case.seq_len, device)
        mask = ours.to_flex(case.seq_len, case.seq_len, causal=case.causal)
        if case.causal:
            # Compiled, it is asked about listed blocks only, which the layout need not confirm.
            mask.mask_mod = lambda b, h, i, j: i >= j
    elif case.causal:
        mask = create_block_mask(
            lambda b, h, i, j: i >= j, None, None, case.seq_len, case.seq_len, device=str(device)
        )
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=False)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = compiled(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), block_mask=mask)
        return out.transpose(1, 2)

    return attend


def flash_attn_4(case: Case, device: torch.device) -> Attention:
    """The package flash-attn-4 (CuTe), where it is installed."""
    try:
        from flash_attn.cute import flash_attn_func  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UnsupportedError(f"cannot be imported ({error})") from error

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result = flash_attn_func(q, k, v, causal=case.causal, softmax_scale=case.head_dim**-0.5)
        return result[0] if isinstance(result, tuple) else result

    return attend


CONTENDERS: dict[str, Callable[[Case, torch.device], Attention]] = {
    "ours": ours,
    "SDPA flash": partial(sdpa, SDPBackend.FLASH_ATTENTION),
    "SDPA cuDNN": partial(sdpa, SDPBackend.CUDNN_ATTENTION),
    "SDPA math": partial(sdpa, SDPBackend.MATH),
    "FlexAttention": flex,
    "flash-attn-4": flash_attn_4,
    "standard": standard,
}


# ---- the check


@dataclass(frozen=True)
class Answer:
    """What a case's results must be: exact values of some heads, and the error they may have."""

    heads: list[tuple[int, int]]  # (batch, head)
    exact: dict[str, Tensor]  # of RESULTS, (heads, T, D) fp64
    budgets: dict[str, float]  # relative errors


def visible_keys(case: Case, rows: slice, batch: int, device: torch.device | str) -> Tensor:
    """(rows, T) bool: which keys the queries of `rows` see, dropout aside."""
    query = torch.arange(rows.start, rows.stop, device=device).unsqueeze(1)
    key = torch.arange(case.seq_len, device=device)
    visible = (key < case.kv_lengths(device)[batch]).expand(query.shape[0], -1)
    if case.causal:
        visible = visible & (key <= query)
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
    scores_a_chunk: int = 2**25,
) -> dict[str, Tensor]:
    """Attention of one head in plain PyTorch, in the dtype of its inputs, some rows at a time.

    Args:
        head: q, k, v and dout (T, D) of one dtype.
        visible: the keys that a slice of the queries sees, (rows, T) bool; at least one a row.
        factor: (T, T) what the probabilities are multiplied by (dropout).
        scores_a_chunk: the largest number of scores held at once.

    Returns:
        RESULTS, (T, D) each; dk and dv are sums over the chunks, in fp32 or fp64.
    """
    q, k, v, dout = (x.detach() for x in head)
    T, D = q.shape
    sum_dtype = torch.promote_types(q.dtype, torch.float32)
    dk, dv = (torch.zeros_like(x, dtype=sum_dtype) for x in (k, v))
    k.requires_grad_()
    v.requires_grad_()
    outs, dqs = [], []
    step = max(1, scores_a_chunk // T)
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
    """The exact answer to `case`, and the errors that its dtype allows."""
    heads = [(0, 0), (case.batch - 1, case.n_head - 1)]
    factor = None
    if case.dropout_p > 0:
        heads = heads[:1]  # the one whose mask does not depend on the sizes of the batch
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
    """The case that a contender is checked on: without dropout where its mask is not known."""
    known = name == "ours" and case.seq_len <= DROPOUT_CHECK_LIMIT
    return case if known else replace(case, dropout_p=0.0)


def errors(attention: Attention, tensors: Tensors, expected: Answer) -> dict[str, float]:
    """The relative error of a contender's out, dq, dk and dv."""
    q, k, v, dout = tensors
    out = attention(q, k, v)
    results = (out.detach(), *torch.autograd.grad(out, (q, k, v), dout))
    return {
        name: relative_error(
            torch.stack([x[b, :, h] for b, h in expected.heads]), expected.exact[name]
        )
        for name, x in zip(RESULTS, results, strict=True)
    }


def verdict(found: dict[str, float], budgets: dict[str, float]) -> str:
    """ "ok", or which results are too far off. A NaN on either side is too far off."""
    wrong = [n for n in RESULTS if not found[n] <= budgets[n] < math.inf]
    if not wrong:
        return "ok"
    listed = ", ".join(f"{found[n]:.1e} of {n} (allowed {budgets[n]:.1e})" for n in wrong)
    return f"wrong: error {listed}"


# ---- times


def time_ms(run: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds of a run on the GPU: the median, and its 20% and 80% quantiles."""
    from triton.testing import do_bench

    quantiles = [0.5, 0.2, 0.8]

    def once() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)

    run()  # compiles
    if (first := once()) < LONG_MS:
        ms: Any = do_bench(run, quantiles=quantiles)
    else:
        times = torch.tensor([first, once(), once()])
        ms = times.quantile(torch.tensor(quantiles)).tolist()
    return dict(zip(("ms", "ms_20", "ms_80"), ms, strict=True))


def graph_ms(run: Callable[[], Any]) -> float:
    """Milliseconds of a run that is replayed as a CUDA graph: without the CPU's share, the median.

    On short sequences the CPU takes longer to launch kernels than the GPU to run them.
    """
    from triton.testing import do_bench

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    ms: Any = do_bench(graph.replay, return_mode="median")
    return ms


def peak_mib(run: Callable[[], Any]) -> float:
    """The most memory that a run takes beside what is allocated already, MiB."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return (torch.cuda.max_memory_allocated() - before) / 2**20
