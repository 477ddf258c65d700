"""Speed, memory and error of attention, ours beside others', on one GPU.

python -m experiments.attention --preset peers     dense attention, against the best
python -m experiments.attention --preset butterfly long butterflies, against the best
python -m experiments.attention --preset blocks    butterflies in blocks of 16 to 128
python -m experiments.attention --preset paper     the paper's Figure 3 and Appendix E
python -m experiments.attention --preset sparsity  time against density: Figure 2, right
python -m experiments.attention --preset io        bytes to and from HBM: Figure 2, left

All contenders of a case run in this process on the same tensors (Triton's tutorial, with
`--tutorial`, on their values in fp16), and a wrong result gets no speed: check.py holds the
rule. Times are medians of the GPU's time; the backward is timed by itself, on a saved
forward. `eager` is both from call to call, with the time that the CPU takes to launch kernels,
which bounds short sequences. FLOPs are 4 B H T^2 D forward, half of it if causal, times the density
of a mask, and 2.5 times that backward. Memory is the peak of a forward and backward, beside the
inputs. A run that is stopped leaves what it measured in NAME.unfinished.json; --resume goes on.
"""

from argparse import Namespace
from pathlib import Path

from experiments.harness import Command, Result, measure_rows

PRESET_NAMES = ("peers", "butterfly", "blocks", "paper", "sparsity", "io")
OWNERS = {"full": "paper", "tutorial": "peers", "against": "peers", "one_run": "io"}


def check(args: Namespace) -> None:
    """Refuse options of another preset than the one that is asked for."""
    for option, preset in OWNERS.items():
        if getattr(args, option) and args.preset != preset:
            name = option.replace("_", "-")
            raise ValueError(f"--{name} is an option of --preset {preset}, not of {args.preset}")


command = Command(__name__, on_gpu=True)
command.add("--preset", choices=PRESET_NAMES, required=True)
command.add("--full", action="store_true", help="paper: all lengths of all variants")
command.add(
    "--tutorial", type=Path, metavar="FILE",
    help="peers: Triton's tutorial 06-fused-attention.py, of the installed version, as one more "
    "peer",
)  # fmt: skip
command.add(
    "--against", nargs="+", metavar="NAME",
    help='peers: dense attention alone, and these peers, such as "SDPA cuDNN" flash-attn-4',
)  # fmt: skip
command.add("--out", type=Path, help="default: docs/results/attention_PRESET.json")
command.add("--one-run", metavar="CASE/PART", help="io: what the profiler looks at")
command.read(resume=True, check=check)

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure

from evaluation.results import Row
from experiments.attention import hbm_bytes, report
from experiments.attention.cases import Case, Sparsity
from experiments.attention.measure import measure_case
from experiments.attention.peers import (
    CONTENDERS,
    PORTABLE,
    TUTORIAL,
    load_tutorial,
    triton_tutorial,
)
from experiments.results import Stage
from experiments.timing import reset_compiler_and_memory

PEER_LENGTHS = (1024, 4096, 16_384)
BUTTERFLY_LENGTHS = (8192, 16_384, 65_536)  # 65,536 tokens a batch
LONGEST = 262_144

PAPER_LENGTHS = [2**n for n in range(7, 17)]
PAPER_VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropout": {"dropout_p": 0.1},
    "padded": {"padded": True},
    "dropout, padded": {"dropout_p": 0.1, "padded": True},
}
VARIANT_LENGTHS = (1024, 4096, 16_384)  # of all variants but "plain", unless --full
# Table 20 of arXiv 2205.14135: ms forward and backward on an A100, by PAPER_LENGTHS
PAPER_DENSE_MS = [0.31, 0.31, 0.73, 2.29, 7.64, 30.09, 118.50, 470.51, 1876.08, 7492.85]
PAPER_SPARSE_MS = [0.74, 0.77, 0.82, 0.88, 1.71, 3.21, 6.56, 12.60, 24.93, 50.39]


def cases(tokens: int, lengths: Sequence[int]) -> Iterator[Case]:
    """All head dimensions, masks and lengths; `tokens` a batch and 2,048 channels."""
    for head_dim, causal, seq_len in itertools.product((64, 128), (True, False), lengths):
        yield Case(tokens // seq_len, seq_len, 2048 // head_dim, head_dim, causal=causal)


def measure_cases(*cases: Case, names: Sequence[str]) -> Iterator[list[Row]]:
    """Each case by these contenders."""
    for case in cases:
        yield measure_case(case, names)


def peers(args: Namespace) -> Iterator[Stage]:
    """Dense attention, ours and all contenders, or those of --against."""
    if unknown := set(args.against or ()) - set(CONTENDERS):
        known = ", ".join(CONTENDERS)
        raise SystemExit(f"--against={', '.join(unknown)} must be among: {known}")
    every = [name for name in CONTENDERS if name != "standard"]  # which memory seldom suffices for
    names = ["ours", PORTABLE, *args.against] if args.against else every
    for case in cases(16_384, PEER_LENGTHS):
        yield partial(measure_cases, case, names=names)


def butterflies(args: Namespace) -> Iterator[Stage]:
    """Each head dimension, mask and length of `measure_butterfly`."""
    for case in cases(65_536, BUTTERFLY_LENGTHS):
        yield partial(measure_butterfly, case)
    longest = Case(1, LONGEST, 32, 64, sparsity=Sparsity("butterfly"))
    yield partial(measure_cases, longest, names=["ours"])


def measure_butterfly(case: Case) -> Iterator[list[Row]]:
    """Ours dense, and a full butterfly by all that take one; at 16,384 tokens also masks that hide
    nothing and hardly anything."""
    yield measure_case(case, ["ours"])
    names = ["ours", PORTABLE, "FlexAttention", "flash-attn-4"]
    yield measure_case(replace(case, sparsity=Sparsity("butterfly")), names)
    if case.seq_len == 16_384:
        for pattern in ("all", "all but one"):
            yield measure_case(replace(case, sparsity=Sparsity(pattern)), ["ours"])


def blocks(args: Namespace) -> Iterator[Stage]:
    """Butterflies of 16,384 tokens in blocks of each size, for each head dimension and mask."""
    for case, size in itertools.product(cases(65_536, [16_384]), (16, 32, 64, 128)):
        case = replace(case, sparsity=Sparsity("butterfly", block_size=size))
        yield partial(measure_cases, case, names=["ours", PORTABLE])


def paper_sparsity(seq_len: int) -> Sparsity:
    """256 keys a row, or an eighth of them, as the paper's times suggest for its benchmark.

    From 2,048 tokens on that is each block of 128 and one partner, otherwise a block by itself.
    """
    if seq_len >= 2048:
        return Sparsity("butterfly", 1, 128)
    return Sparsity("butterfly", 0, max(16, seq_len // 8))


def paper(args: Namespace) -> Iterator[Stage]:
    """All variants and lengths of `measure_paper`, as in Appendix E."""
    for variant in PAPER_VARIANTS:
        for seq_len in PAPER_LENGTHS if args.full or variant == "plain" else VARIANT_LENGTHS:
            yield partial(measure_paper, variant, seq_len)


def measure_paper(variant: str, seq_len: int) -> Iterator[list[Row]]:
    """Standard attention, SDPA, ours dense and ours block-sparse."""
    case = Case(16, seq_len, 8, 64, torch.float16, **PAPER_VARIANTS[variant])
    rows = measure_case(case, ["standard", "SDPA flash", "ours"])
    rows += measure_case(replace(case, sparsity=paper_sparsity(seq_len)), ["ours"])
    yield [{"variant": variant, **row} for row in rows]


def add_speedup(rows: list[Row]) -> None:
    """To our block-sparse rows: how much faster than dense, forward and backward; the paper's."""
    ms = zip(PAPER_LENGTHS, PAPER_DENSE_MS, PAPER_SPARSE_MS, strict=True)
    paper_speedup = {seq_len: dense / sparse for seq_len, dense, sparse in ms}
    for row, dense in report.with_dense(rows):
        row["speedup"] = dense["both_ms"] / row["both_ms"]
        if row["variant"] == "plain":
            row["paper_speedup"] = paper_speedup[row["seq_len"]]


def sparsity(args: Namespace) -> list[Stage]:
    """Ours at 4,096 tokens in blocks of 128: butterflies and windows from sparse to dense."""
    masks = [None, *(Sparsity("butterfly", n_factors) for n_factors in range(6))]
    masks += [Sparsity("window", width) for width in (2, 3, 5, 9, 17)]
    cases = [replace(Case(4, 4096, 32, 64), sparsity=mask) for mask in masks]
    return [partial(measure_cases, *cases, names=["ours"])]


def measure_io() -> Iterator[list[Row]]:
    """Bytes to and from HBM, and times: experiments/attention/hbm_bytes.py."""
    rows = {}
    for name, case in hbm_bytes.CASES.items():
        (rows[name],) = measure_case(case, [hbm_bytes.contender(name)])
    reset_compiler_and_memory()  # the profiled runs are processes of their own, on the same GPU
    yield hbm_bytes.with_bytes(rows)


class Preset(NamedTuple):
    """One --preset: what it measures and compares, and how its rows are printed and drawn."""

    stages: Callable[[Namespace], Iterable[Stage]]
    relate: Callable[[list[Row]], None]
    text: Callable[[list[Row]], str]
    draw: Callable[[list[Row]], Figure] | None = None  # None: a table says it better


PRESETS = {
    "peers": Preset(peers, report.add_best_peer, report.peers_text, report.draw_peers),
    "butterfly": Preset(
        butterflies, report.relate_butterflies, report.butterfly_text, report.draw_butterflies
    ),
    "blocks": Preset(blocks, report.add_portable, report.blocks_text),
    "paper": Preset(paper, add_speedup, report.paper_text, report.draw_paper),
    "sparsity": Preset(sparsity, report.add_proportion, report.sparsity_text, report.draw_sparsity),
    "io": Preset(lambda args: [measure_io], lambda rows: None, hbm_bytes.text, hbm_bytes.draw),
}


@command.main
def main(args: Namespace) -> None:
    """Measure a preset.

    Raises:
        SystemExit: some results are wrong.
    """
    if args.one_run:
        return hbm_bytes.one_run(args.one_run)
    if args.tutorial:
        CONTENDERS[TUTORIAL] = partial(triton_tutorial, load_tutorial(args.tutorial))
    preset = PRESETS[args.preset]
    args.out = args.out or Path(f"docs/results/attention_{args.preset}.json")

    def draw(result: Result) -> Figure | None:
        some = any(row["status"] == "ok" for row in result["rows"])  # else there is nothing to draw
        return preset.draw(result["rows"]) if preset.draw and some else None

    rows = measure_rows(
        args, preset.stages(args), lambda result: preset.text(result["rows"]), preset.relate,
        draw=draw, preset=args.preset,
    )  # fmt: skip
    if wrong := [row for row in rows if row["status"].startswith("wrong")]:
        raise SystemExit(f"{len(wrong)} of {len(rows)} results are wrong, and have no speed")
