"""Cost of attention options and of other head dimensions, forward and backward.

python -m experiments.attention.features

Causal attention on 4,096 tokens with one option at a time, by the default kernels of this GPU and
by the portable ones: 16,384 tokens per batch, 2,048 channels, bfloat16. The command fails if the
two disagree. Times are medians of GPU time.
"""

from experiments.harness import Command, measure_rows

command = Command(__name__, on_gpu=True)
command.read(out="docs/results/attention_features.json", resume=True)

from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from evaluation.markdown import dict_table
from evaluation.results import Row
from experiments.attention.cases import DROPOUT_SEED, Case, make_tensors
from experiments.timing import gpu_ms
from kernels import flash_attention
from kernels.testing import relative_error

PASSES = ("forward", "backward")
SEQ_LEN = 4096
TOKENS, CHANNELS = 16_384, 2048
ALL_OPTIONS = (64, 128)  # head dimensions timed with every option
PLAIN = (96, 192, 256)  # head dimensions timed without options
TOLERANCE = 1e-2  # relative error between two kernels that round intermediates to bfloat16


def case(head_dim: int) -> Case:
    """Plain causal attention; head_dim 96 and 192 use the channels that whole heads fill."""
    return Case(TOKENS // SEQ_LEN, SEQ_LEN, CHANNELS // head_dim, head_dim, causal=True)


def option_sets(problem: Case, device: str) -> dict[str, dict[str, Any]]:
    """Options of `flash_attention` in addition to causal, by name."""
    position = torch.arange(problem.seq_len, device=device).expand(problem.batch, -1)
    quarter = problem.seq_len // 4
    lengths = [problem.seq_len - 20 * (i + 1) for i in range(problem.batch)]
    return {
        "": {},
        "dropout": {"dropout_p": 0.1, "dropout_seed": torch.tensor([DROPOUT_SEED], device=device)},
        "padding": {"kv_lengths": torch.tensor(lengths, dtype=torch.int32, device=device)},
        "sinks": {"sinks": torch.zeros(problem.n_head, device=device)},
        "softcap": {"softcap": 30.0},
        "ALiBi": {"alibi_slopes": torch.linspace(0.5, 0.004, problem.n_head, device=device)},
        "a window of a quarter": {"window_size": quarter},
        "four documents": {"doc_start": (position // quarter * quarter).int()},
    }


def measure(head_dim: int, device: str = "cuda") -> Iterator[list[Row]]:
    """Yield a row for each set of options."""
    problem = case(head_dim)
    q, k, v, dout = make_tensors(problem, device)
    sets = option_sets(problem, device)
    for name in sets if head_dim in ALL_OPTIONS else [""]:
        results, times = [], {}
        for kernels, impl in (("", None), ("portable_", "triton")):
            attend = partial(flash_attention, causal=True, impl=impl, **sets[name])
            out = attend(q, k, v)
            backward = partial(torch.autograd.grad, out, (q, k, v), dout, retain_graph=True)
            results.append((out, *backward()))
            forward = partial(attend, *(x.detach() for x in (q, k, v)))
            times[f"{kernels}forward_ms"] = gpu_ms(forward)["ms"]
            times[f"{kernels}backward_ms"] = gpu_ms(backward)["ms"]
        difference = max(map(relative_error, *results))
        if not difference <= TOLERANCE:
            raise SystemExit(
                f"head_dim {head_dim}, {name or 'plain'}: the kernels differ by {difference:.1e}, "
                f"which must be at most {TOLERANCE:.0e}: no speed is reported"
            )
        yield [{"name": name, **problem.describe(), "difference": difference, **times}]


DISPLAYED = {
    "": "none",
    "a window of a quarter": "window of 1,024",
    "four documents": "4 packed documents",
}
"""Names of options in the table, by their names in results."""


def features_table(result: Row) -> str:
    """Markdown table of milliseconds by option."""
    plain = {row["head_dim"]: row for row in result["rows"] if not row["name"]}
    lines = []
    for row in result["rows"]:
        line = {"head_dim": str(row["head_dim"]), "option": DISPLAYED.get(row["name"], row["name"])}
        for part in PASSES:
            ms, ms_plain = row[f"{part}_ms"], plain[row["head_dim"]][f"{part}_ms"]
            line[f"{part}, ms"] = f"{ms:.3f}"
            line[f"{part} / no option"] = f"{ms / ms_plain:.2f}"
            line[f"{part}, portable / default"] = f"{row[f'portable_{part}_ms'] / ms:.2f}"
        lines.append(line)
    return dict_table(lines)


def print_last(rows: list[Row]) -> None:
    """Print the last row in one line."""
    row = rows[-1]
    speeds = (
        f"{part} {row[f'{part}_ms']:.3f} ms, portable {row[f'portable_{part}_ms']:.3f} ms"
        for part in PASSES
    )
    print(f"{row['head_dim']:4} {row['name'] or 'plain':24}", *speeds, flush=True)


@command.main
def main(args: Namespace) -> None:
    """Measure each head dimension in its own stage."""
    stages = [partial(measure, head_dim) for head_dim in (*ALL_OPTIONS, *PLAIN)]
    measure_rows(args, stages, features_table, print_last)
