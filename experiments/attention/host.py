"""What a call of attention costs the CPU: on short sequences the GPU waits for that.

python -m experiments.attention.host

Forward of 512 tokens of GPT-2 small, with gradients to come. `launch` is our kernel alone, as its
operator calls it; `CUDA graph` replays a graph of one call. Medians over batches of calls, during
which the CPU waits for nothing.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from configs.command_line import command_parser, errors_as_sentences, read_first


@read_first
def options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """What the command line says."""
    parser = command_parser(__doc__, __spec__)
    parser.add_argument("--out", type=Path, default=Path("docs/results/attention_host.json"))
    return parser.parse_args(argv)


import importlib
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from evaluation.results import Row, collect_rows
from experiments.attention.cases import Case, Tensors, make_tensors
from experiments.attention.peers import CONTENDERS, PORTABLE, UnsupportedError
from experiments.attention.report import Result
from experiments.reports import table
from kernels.ops import IMPLEMENTATIONS
from kernels.options import AttentionOptions

CASE = Case(1, 512, 12, 64, causal=True)
NAMES = ["ours", PORTABLE, "SDPA cuDNN", "SDPA flash", "flash-attn-4"]
CALLS, BATCHES = 50, 40


def host_us(call: Callable[[], Any]) -> float:
    """Microseconds that the CPU takes for a call: the median of `BATCHES`, of `CALLS` each."""
    found = []
    for _ in range(BATCHES + 1):  # the first compiles
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        found.append((time.perf_counter() - start) / CALLS * 1e6)
    return statistics.median(found[1:])


def graph_of(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of one call."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def calls(tensors: Tensors) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What is timed, by name."""
    q, k, v, _ = tensors
    detached = (q.detach(), k.detach(), v.detach())
    asked = AttentionOptions(causal=CASE.causal, softmax_scale=CASE.head_dim**-0.5)
    ours = CONTENDERS["ours"](CASE, q.device)
    names = {"triton": PORTABLE}
    if torch.cuda.get_device_capability()[0] == 9:
        names["hopper"] = "ours"
    for impl, name in names.items():
        kernel = importlib.import_module(IMPLEMENTATIONS[impl][0], "kernels")
        yield f"{name}, launch", partial(kernel.attn_fwd, *detached, asked)
    yield "ours, CUDA graph", graph_of(partial(ours, *detached)).replay
    for name in NAMES:
        try:
            yield name, partial(CONTENDERS[name](CASE, q.device), q, k, v)
        except UnsupportedError as reason:
            print(f"{name}: {reason}")


def measure() -> Iterator[list[Row]]:
    """A row for each name."""
    for name, call in calls(make_tensors(CASE, "cuda")):
        yield [{"name": name, **CASE.describe(), "host_us": host_us(call)}]


def host_table(result: Result) -> str:
    """CPU time by name, in Markdown."""
    rows = result["rows"]
    return table({"a call of": row["name"], "CPU, us": f"{row['host_us']:.0f}"} for row in rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    args = options(argv)
    if not torch.cuda.is_available():
        raise SystemExit("a launch is measured on a GPU, and PyTorch sees none")
    rows = collect_rows(args.out, [measure])
    print(host_table({"rows": rows}))
    print(f"wrote {args.out}")


if __name__ == "__main__":
    with errors_as_sentences():
        main()
