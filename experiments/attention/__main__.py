"""Speed, memory and error of attention on one GPU, compared with other implementations.

python -m experiments.attention --preset peers     dense attention, and its best peers
python -m experiments.attention --preset hopper    its fastest peers, and those that repeat
python -m experiments.attention --preset butterfly long butterflies, and their best peers
python -m experiments.attention --preset blocks    butterflies in blocks of 16 to 128
python -m experiments.attention --preset paper     the paper's Figure 3 and Appendix E
python -m experiments.attention --preset approximate  Figure 3's approximations of attention
python -m experiments.attention --preset sparsity  time against density: Figure 2, right
python -m experiments.attention --preset io        bytes to and from HBM: Figure 2, left

All contenders of a case run in this process on the same tensors. Triton's tutorial (`--tutorial`)
gets the values in fp16. A wrong result gets no speed; check.py has the rule. Times are medians of
GPU time. The backward pass is timed on its own, on a saved forward pass. `eager` times both passes
from call to call, including the CPU time of kernel launches, which bounds short sequences. FLOPs
are 4 B H T^2 D forward, half of it if causal, times the density of a mask, and 2.5 times that
backward. Memory is the peak of both passes, without the inputs. An interrupted run leaves its
measurements in NAME.unfinished.json; --resume continues it.
"""

from argparse import Namespace
from pathlib import Path

from experiments.harness import Command, Result, measure_rows

PRESET_NAMES = ("peers", "hopper", "butterfly", "blocks", "paper", "approximate", "sparsity", "io")
OWNERS = {"full": "paper", "compiled": "approximate", "tutorial": "peers", "one_run": "io"}


def check(args: Namespace) -> None:
    """Reject options that belong to another preset."""
    for option, preset in OWNERS.items():
        if getattr(args, option) and args.preset != preset:
            name = option.replace("_", "-")
            raise ValueError(f"--{name} is an option of --preset {preset}, not of {args.preset}")


command = Command(__name__, on_gpu=True)
command.add("--preset", choices=PRESET_NAMES, required=True)
command.add("--full", action="store_true", help="paper: all lengths of all variants")
command.add("--compiled", action="store_true", help="approximate: compiled as well; takes minutes")
command.add(
    "--tutorial", type=Path, metavar="FILE",
    help="peers: add Triton's tutorial 06-fused-attention.py, of the installed version, as a peer",
)  # fmt: skip
command.add("--out", type=Path, help="default: docs/results/attention_PRESET.json")
command.add("--one-run", metavar="CASE/PART", help="io: run only this, for the profiler")
command.read(resume=True, check=check)

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure

from evaluation.results import Row
from experiments.attention import hbm_bytes, pictures, report
from experiments.attention.approximate import APPROXIMATE, CAUSAL, COMPILED, EAGER, PACKAGES
from experiments.attention.cases import Case, Sparsity
from experiments.attention.measure import measure_case
from experiments.attention.peers import (
    CONTENDERS,
    PORTABLE,
    REPEATABLE,
    TUTORIAL,
    load_tutorial,
    triton_tutorial,
    versions,
)
from experiments.results import Stage
from experiments.timing import reset_compiler_and_memory

PEER_LENGTHS = (1024, 4096, 16_384)
BUTTERFLY_LENGTHS = (8192, 16_384, 65_536)  # 65,536 tokens per batch
LONGEST = 262_144
REPEATS = 20  # runs that must give the same bits
ROUNDS = 10  # of timings in turns

PAPER_LENGTHS = [2**n for n in range(7, 17)]
PAPER_VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropout": {"dropout_p": 0.1},
    "padded": {"padded": True},
    "dropout, padded": {"dropout_p": 0.1, "padded": True},
}
COMPILED_FROM = 1024  # tokens
VARIANT_LENGTHS = (1024, 4096, 16_384)  # of the other variants, unless --full
# Table 20 of arXiv 2205.14135: forward and backward on an A100, ms, by PAPER_LENGTHS
PAPER_DENSE_MS = [0.31, 0.31, 0.73, 2.29, 7.64, 30.09, 118.50, 470.51, 1876.08, 7492.85]
PAPER_SPARSE_MS = [0.74, 0.77, 0.82, 0.88, 1.71, 3.21, 6.56, 12.60, 24.93, 50.39]


def cases(tokens: int, lengths: Sequence[int]) -> Iterator[Case]:
    """Yield all head dimensions, masks and lengths, with `tokens` per batch and 2,048 channels."""
    for head_dim, causal, seq_len in itertools.product((64, 128), (True, False), lengths):
        yield Case(tokens // seq_len, seq_len, 2048 // head_dim, head_dim, causal=causal)


def measure_cases(
    *cases: Case, names: Sequence[str], runs: int = 0, rounds: int = 0
) -> Iterator[list[Row]]:
    """Measure each case with these contenders; `runs` and `rounds` are those of `measure_case`."""
    for case in cases:
        yield measure_case(case, names, runs=runs, rounds=rounds)


def peers(args: Namespace) -> Iterator[Stage]:
    """Dense attention of Papilio and all exact contenders, except those that repeat (`hopper`)."""
    # standard attention seldom fits into memory
    others = ("standard", *REPEATABLE, *APPROXIMATE)
    names = [name for name in CONTENDERS if name not in others]
    for case in cases(16_384, PEER_LENGTHS):
        yield partial(measure_cases, case, names=names)


def hopper(args: Namespace) -> Iterator[Stage]:
    """Dense attention and butterflies: Papilio, the fastest peers, and those that repeat."""
    names = ["ours", PORTABLE, "SDPA cuDNN", "flash-attn-4", *REPEATABLE]
    for case in cases(16_384, PEER_LENGTHS):
        yield partial(measure_cases, case, names=names, runs=REPEATS, rounds=ROUNDS)
    names = ["ours", "FlexAttention", "flash-attn-4", "flash-attn-4, deterministic"]
    for case in cases(16_384, [16_384]):
        sparse = replace(case, sparsity=Sparsity("butterfly"))
        yield partial(measure_cases, sparse, names=names, runs=REPEATS, rounds=ROUNDS)


def butterflies(args: Namespace) -> Iterator[Stage]:
    """`measure_butterfly` for each head dimension, mask and length."""
    for case in cases(65_536, BUTTERFLY_LENGTHS):
        yield partial(measure_butterfly, case)
    longest = Case(1, LONGEST, 32, 64, sparsity=Sparsity("butterfly"))
    yield partial(measure_cases, longest, names=["ours"])


def measure_butterfly(case: Case) -> Iterator[list[Row]]:
    """Measure dense attention, and a full butterfly with all contenders that support it.

    At 16,384 tokens, also measure masks that hide nothing, and a single block.
    """
    yield measure_case(case, ["ours"])
    names = ["ours", PORTABLE, "FlexAttention", "flash-attn-4"]
    yield measure_case(replace(case, sparsity=Sparsity("butterfly")), names)
    if case.seq_len == 16_384:
        for pattern in ("all", "all but one"):
            yield measure_case(replace(case, sparsity=Sparsity(pattern)), ["ours"])


def blocks(args: Namespace) -> Iterator[Stage]:
    """Butterflies on 16,384 tokens with each block size, for each head dimension and mask."""
    for case, size in itertools.product(cases(65_536, [16_384]), (16, 32, 64, 128)):
        case = replace(case, sparsity=Sparsity("butterfly", block_size=size))
        yield partial(measure_cases, case, names=["ours", PORTABLE])


def paper_sparsity(seq_len: int) -> Sparsity:
    """Mask with 256 keys per row, or an eighth of all keys if that is fewer.

    The paper's times suggest this for its benchmark. From 2,048 tokens on, each block of 128 sees
    itself and one partner. Below, each block sees itself only.
    """
    if seq_len >= 2048:
        return Sparsity("butterfly", 1, 128)
    return Sparsity("butterfly", 0, max(16, seq_len // 8))


def paper(args: Namespace) -> Iterator[Stage]:
    """`measure_paper` for all variants and lengths of Appendix E."""
    for variant in PAPER_VARIANTS:
        for seq_len in PAPER_LENGTHS if args.full or variant == "plain" else VARIANT_LENGTHS:
            yield partial(measure_paper, variant, seq_len)


def measure_paper(variant: str, seq_len: int) -> Iterator[list[Row]]:
    """Measure standard attention, SDPA, and Papilio dense and block-sparse."""
    case = Case(16, seq_len, 8, 64, torch.float16, **PAPER_VARIANTS[variant])
    rows = measure_case(case, ["standard", "SDPA flash", "ours"])
    rows += measure_case(replace(case, sparsity=paper_sparsity(seq_len)), ["ours"])
    yield [{"variant": variant, **row} for row in rows]


def add_speedup(rows: list[Row]) -> None:
    """Add the speedup over dense attention to block-sparse rows, and the paper's speedup."""
    ms = zip(PAPER_LENGTHS, PAPER_DENSE_MS, PAPER_SPARSE_MS, strict=True)
    paper_speedup = {seq_len: dense / sparse for seq_len, dense, sparse in ms}
    for row, dense in report.with_dense(rows):
        row["speedup"] = dense["both_ms"] / row["both_ms"]
        if row["variant"] == "plain":
            row["paper_speedup"] = paper_speedup[row["seq_len"]]


def approximate(args: Namespace) -> Iterator[Stage]:
    """Approximations at the paper's lengths; with --compiled, also compiled, from 1,024 on."""
    for seq_len in PAPER_LENGTHS:
        yield partial(measure_approximate, Case(16, seq_len, 8, 64))
        if args.compiled and seq_len >= COMPILED_FROM:
            yield partial(measure_cases, Case(16, seq_len, 8, 64), names=[*COMPILED])


def measure_approximate(full: Case) -> Iterator[list[Row]]:
    """Measure approximations next to Papilio: dense, 256 keys per row, and a full butterfly."""
    for case, names in ((full, [*EAGER]), (replace(full, causal=True), [CAUSAL])):
        yield measure_case(case, ["ours", *names])
        for mask in (paper_sparsity(case.seq_len), Sparsity("butterfly")):
            yield measure_case(replace(case, sparsity=mask), ["ours"])


def sparsity(args: Namespace) -> list[Stage]:
    """Papilio at 4,096 tokens in blocks of 128: butterflies and windows, sparse to dense."""
    masks = [None, *(Sparsity("butterfly", n_factors) for n_factors in range(6))]
    masks += [Sparsity("window", width) for width in (2, 3, 5, 9, 17)]
    cases = [replace(Case(4, 4096, 32, 64), sparsity=mask) for mask in masks]
    return [partial(measure_cases, *cases, names=["ours"])]


def measure_io() -> Iterator[list[Row]]:
    """Measure HBM traffic and times (hbm_bytes.py)."""
    rows = {}
    for name, case in hbm_bytes.CASES.items():
        (rows[name],) = measure_case(case, [hbm_bytes.contender(name)])
    reset_compiler_and_memory()  # the profiled processes use the same GPU
    yield hbm_bytes.with_bytes(rows)


class Preset(NamedTuple):
    """One --preset: its measurements, comparisons, table and picture."""

    stages: Callable[[Namespace], Iterable[Stage]]
    relate: Callable[[list[Row]], None]
    text: Callable[[list[Row]], str]
    draw: Callable[[list[Row]], Figure] | None = None  # None: no picture


PRESETS = {
    "peers": Preset(peers, report.add_best_peer, report.peers_text, pictures.draw_peers),
    "hopper": Preset(hopper, report.add_best_repeatable, report.hopper_text, pictures.draw_fastest),
    "butterfly": Preset(
        butterflies, report.relate_butterflies, report.butterfly_text, pictures.draw_butterflies
    ),
    "blocks": Preset(blocks, report.add_portable, report.blocks_text),
    "paper": Preset(paper, add_speedup, report.paper_text, pictures.draw_paper),
    "approximate": Preset(
        approximate,
        report.add_over_block_sparse,
        report.approximate_text,
        pictures.draw_approximate,
    ),
    "sparsity": Preset(
        sparsity, report.add_proportion, report.sparsity_text, pictures.draw_sparsity
    ),
    "io": Preset(lambda args: [measure_io], lambda rows: None, hbm_bytes.text, hbm_bytes.draw),
}


@command.main
def main(args: Namespace) -> None:
    """Measure a preset.

    Raises:
        SystemExit: a result is wrong.
    """
    if args.one_run:
        return hbm_bytes.one_run(args.one_run)
    if args.tutorial:
        CONTENDERS[TUTORIAL] = partial(triton_tutorial, load_tutorial(args.tutorial))
    preset = PRESETS[args.preset]
    args.out = args.out or Path(f"docs/results/attention_{args.preset}.json")

    def draw(result: Result) -> Figure | None:
        has_times = any(row["status"] == "ok" for row in result["rows"])
        return preset.draw(result["rows"]) if preset.draw and has_times else None

    packages = PACKAGES if args.preset == "approximate" else ("flash-attn-4",)
    rows = measure_rows(
        args, preset.stages(args), lambda result: preset.text(result["rows"]), preset.relate,
        draw=draw, preset=args.preset, versions=versions(packages),
    )  # fmt: skip
    if wrong := [row for row in rows if row["status"].startswith("wrong")]:
        raise SystemExit(f"{len(wrong)} of {len(rows)} results are wrong and were not timed")
