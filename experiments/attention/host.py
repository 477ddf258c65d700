"""CPU time of an eager attention call, which bounds the speed on short sequences.

python -m experiments.attention.host

Each call has 512 tokens in the shape of GPT-2 small and requires gradients: dense and causal, under
a block-sparse mask, with packed documents, with dropout, and PyTorch's SDPA on these kernels, after
`register_with_torch`. Timed are the forward pass alone, and forward and backward. A backward pass
wakes a thread of PyTorch, which takes as long as a call. So both passes are also timed for 12 calls
in a row, as in a model of 12 layers. `launch` is only the prepared launch of the kernel. `CUDA
graph` replays a graph of one forward call. `no kernel` is a torch.autograd.Function in Python that
allocates the results and launches nothing. The CPU never waits for the GPU. Contenders alternate in
batches of calls, and each time is the minimum over the batches, because other processes take CPU
time on a shared machine.
"""

from experiments.harness import Command, measure_rows

command = Command(__name__, on_gpu=True)
command.read(out="docs/results/attention_host.json")

import importlib
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from evaluation.markdown import dict_table
from evaluation.results import Row
from experiments.attention.cases import Attention, Case, Sparsity, Tensors, make_tensors
from experiments.attention.peers import CONTENDERS, PORTABLE, UnsupportedError, registered, sdpa
from experiments.reports import display_name
from experiments.timing import cpu_seconds, in_turns
from kernels.ops import IMPLEMENTATIONS
from kernels.options import AttentionOptions

CASE = Case(1, 512, 12, 64, causal=True)
LAYERS = 12
NO_KERNEL = "autograd.Function, no kernel"
WITH_MASKS = ["ours", "FlexAttention", "flash-attn-4"]
CALLS, BATCHES = 48, 40


def host_us(calls: dict[str, Callable[[], Any]], n: int = CALLS) -> dict[str, float]:
    """CPU time of each call in microseconds: the minimum of `BATCHES` batches of n calls."""
    # the first batch compiles
    times = in_turns(calls, BATCHES + 1, partial(cpu_seconds, n=n))
    return {name: 1e6 * min(batches[1:]) for name, batches in times.items()}


def graph_of(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """Capture one call in a CUDA graph."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def launches(tensors: Tensors) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield named calls: kernel launches without their operators, and a CUDA graph replay."""
    q, k, v = (x.detach() for x in tensors[:3])
    options = AttentionOptions(causal=CASE.causal, softmax_scale=CASE.head_dim**-0.5, launches={})
    names = {"triton": PORTABLE}
    if torch.cuda.get_device_capability()[0] == 9:
        names["hopper"] = "ours"
    for impl, name in names.items():
        kernel = importlib.import_module(IMPLEMENTATIONS[impl][0], "kernels")
        yield f"{name}, launch", partial(kernel.attn_fwd, q, k, v, options)
    yield "ours, CUDA graph", graph_of(partial(CONTENDERS["ours"](CASE, q.device), q, k, v)).replay


class NoKernel(torch.autograd.Function):
    """Lower bound for attention in Python: allocate the results and launch nothing."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return torch.empty_like(q)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors)


ALL_CONTENDERS = {
    **CONTENDERS,
    "SDPA": partial(sdpa, None),
    NO_KERNEL: lambda case, device: NoKernel.apply,
}
# Case and contenders of each call
CALLS_BY_NAME = {
    "causal": (CASE, ["ours", PORTABLE, "SDPA", "flash-attn-4", NO_KERNEL]),
    "butterfly": (replace(CASE, sparsity=Sparsity("butterfly")), WITH_MASKS),
    "documents": (replace(CASE, document=128), WITH_MASKS),
    "dropout": (replace(CASE, dropout_p=0.1), ["ours", "SDPA"]),
}


def both_passes(attend: Attention, tensors: Tensors, layers: int) -> tuple[Tensor, ...]:
    """Gradients of `layers` attention calls, each on the output of the previous one."""
    q, k, v, dout = tensors
    out = q
    for _ in range(layers):
        out = attend(out, k, v).reshape(q.shape)
    return torch.autograd.grad(out, (q, k, v), dout)


def rows_of(call: str, case: Case, names: list[str]) -> list[Row]:
    """Time the contenders of one call: a row for each that supports it."""
    tensors = make_tensors(case, "cuda")
    contenders = {}
    for name in names:
        try:
            attend = ALL_CONTENDERS[name](case, tensors.q.device)
            both_passes(attend, tensors, 1)
            contenders[name] = attend
        except UnsupportedError as reason:
            print(f"{call}, {name}: {reason}")
    forward = {name: partial(attend, *tensors[:3]) for name, attend in contenders.items()}
    once, in_row = (
        {name: partial(both_passes, x, tensors, n) for name, x in contenders.items()}
        for n in (1, LAYERS)
    )
    times = host_us(forward), host_us(once), host_us(in_row, CALLS // LAYERS)
    return [
        {
            "call": call, "name": name, **case.describe(), "forward_us": times[0][name],
            "both_us": times[1][name], "in_row_us": times[2][name] / LAYERS,
        }
        for name in contenders
    ]  # fmt: skip


def measure() -> Iterator[list[Row]]:
    """Yield the rows of each call, one per contender."""
    alone = host_us(dict(launches(make_tensors(CASE, "cuda"))))
    yield [
        {"call": "causal", "name": name, **CASE.describe(), "forward_us": us}
        for name, us in alone.items()
    ]
    for call, (case, names) in CALLS_BY_NAME.items():
        yield rows_of(call, case, names)
    with registered():
        rows = rows_of("causal, after register_with_torch", CASE, ["ours", "SDPA"])
    yield rows


def host_table(result: Row) -> str:
    """Markdown table of CPU time by call and contender."""
    columns = {
        "forward, us": "forward_us",
        "forward and backward, us": "both_us",
        "both, per call of 12 in a row, us": "in_row_us",
    }
    return dict_table(
        {"call": row["call"], "implementation": display_name(row["name"])}
        | {head: f"{row[key]:.0f}" if key in row else "" for head, key in columns.items()}
        for row in result["rows"]
    )


@command.main
def main(args: Namespace) -> None:
    """Measure all calls."""
    measure_rows(args, [measure], host_table)
