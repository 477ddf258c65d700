"""What options of attention and other head dimensions cost our forward and backward pass.

python -m experiments.attention.features

Causal attention on 4,096 tokens, by the kernels that this GPU gets and by the portable ones, with
one option at a time: 16,384 tokens a batch, 2,048 channels, bfloat16. Times are told only where
both agree. Medians of the GPU's time.
"""

from experiments.harness import Command, measure_rows

command = Command(__name__, on_gpu=True)
command.read(out="docs/results/attention_features.json", resume=True)

from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from evaluation.results import Row
from experiments.attention.cases import DROPOUT_SEED, Case, make_tensors
from experiments.reports import table
from experiments.timing import gpu_ms
from kernels import flash_attention
from kernels.testing import relative_error

PASSES = ("forward", "backward")
SEQ_LEN = 4096
TOKENS, CHANNELS = 16_384, 2048
ALL_OPTIONS = (64, 128)  # head dimensions that are timed with every option
PLAIN = (96, 192, 256)  # and those that are timed without any
AGREE = 1e-2  # relative error between two kernels, each of which rounds to bfloat16 on its way


def case(head_dim: int) -> Case:
    """Plain causal attention; at 96 and 192 on as many channels as whole heads fill."""
    return Case(TOKENS // SEQ_LEN, SEQ_LEN, CHANNELS // head_dim, head_dim, causal=True)


def option_sets(asked: Case, device: str) -> dict[str, dict[str, Any]]:
    """Options of `flash_attention` beside causal, by what they are called."""
    position = torch.arange(asked.seq_len, device=device).expand(asked.batch, -1)
    quarter = asked.seq_len // 4
    lengths = [asked.seq_len - 20 * (i + 1) for i in range(asked.batch)]
    return {
        "": {},
        "dropout": {"dropout_p": 0.1, "dropout_seed": torch.tensor([DROPOUT_SEED], device=device)},
        "padding": {"kv_lengths": torch.tensor(lengths, dtype=torch.int32, device=device)},
        "sinks": {"sinks": torch.zeros(asked.n_head, device=device)},
        "softcap": {"softcap": 30.0},
        "a window of a quarter": {"window_size": quarter},
        "four documents": {"doc_start": (position // quarter * quarter).int()},
    }


def measure(head_dim: int, device: str = "cuda") -> Iterator[list[Row]]:
    """A row for each set of options."""
    asked = case(head_dim)
    q, k, v, dout = make_tensors(asked, device)
    sets = option_sets(asked, device)
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
        if not difference <= AGREE:
            raise SystemExit(
                f"head_dim {head_dim}, {name or 'plain'}: our kernels differ by {difference:.1e}, "
                f"and may by {AGREE:.0e}: no speed is reported"
            )
        yield [{"name": name, **asked.describe(), "difference": difference, **times}]


def features_table(result: Row) -> str:
    """Milliseconds by option, in Markdown."""
    plain = {row["head_dim"]: row for row in result["rows"] if not row["name"]}
    lines = []
    for row in result["rows"]:
        line = {"head_dim": str(row["head_dim"]), "causal, with": row["name"] or "nothing else"}
        for part in PASSES:
            ms, ms_plain = row[f"{part}_ms"], plain[row["head_dim"]][f"{part}_ms"]
            line[f"{part}, ms"] = f"{ms:.3f}"
            line[f"{part}, of plain"] = f"{ms / ms_plain:.2f}"
            line[f"{part}, portable / ours"] = f"{row[f'portable_{part}_ms'] / ms:.2f}"
        lines.append(line)
    return table(lines)


def print_last(rows: list[Row]) -> None:
    """The last row in one line."""
    row = rows[-1]
    speeds = (
        f"{part} {row[f'{part}_ms']:.3f} ms, portable {row[f'portable_{part}_ms']:.3f} ms"
        for part in PASSES
    )
    print(f"{row['head_dim']:4} {row['name'] or 'plain':24}", *speeds, flush=True)


@command.main
def main(args: Namespace) -> None:
    """Measure each head dimension in a stage of its own."""
    stages = [partial(measure, head_dim) for head_dim in (*ALL_OPTIONS, *PLAIN)]
    measure_rows(args, stages, features_table, print_last)
