"""Speed, memory and error of attention, ours beside others', on one GPU.

python -m scripts.benchmark_attention --preset peers     dense and butterfly, against the best
python -m scripts.benchmark_attention --preset paper     the paper's Figure 3 and Appendix E
python -m scripts.benchmark_attention --preset sparsity  time against density: Figure 2, right
python -m scripts.benchmark_attention --preset io        bytes to and from HBM: Figure 2, left

All contenders of a case run in this process on the same tensors, and a wrong result gets no speed:
scripts/attention_peers.py holds the rule. Times are medians; the backward is timed by itself, on a
saved forward. `as graph` is both replayed as a CUDA graph, without the CPU's share, of short
sequences. FLOPs are 4 B H T^2 D forward, half of it if causal, times the density of a mask, and
2.5 times that backward. Memory is the peak of a forward and backward, beside the inputs.
"""

import argparse
import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from scripts import attention_io
from scripts.attention_peers import (
    CONTENDERS,
    Answer,
    Attention,
    Case,
    Sparsity,
    Tensors,
    UnsupportedError,
    answer,
    checked_case,
    errors,
    graph_ms,
    make_tensors,
    peak_mib,
    time_ms,
    verdict,
)
from scripts.results import write_result

PEERS = ["ours", "SDPA flash", "SDPA cuDNN", "SDPA math", "FlexAttention", "flash-attn-4"]
PEER_LENGTHS = (1024, 4096, 16_384)
BUTTERFLY_LENGTHS = (4096, 16_384, 32_768, 65_536)

GRAPH_LIMIT = 8192  # tokens; up to here runs are timed as CUDA graphs too
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

# Heading and format of a number in a table, by its key in a row
COLUMNS = {
    "density": ("density", ".3f"),
    "forward_tflops": ("fwd TF/s", ".0f"),
    "backward_tflops": ("bwd TF/s", ".0f"),
    "forward_ms": ("fwd ms", ".3f"),
    "backward_ms": ("bwd ms", ".3f"),
    "both_ms": ("both ms", ".3f"),
    "both_graph_ms": ("as graph", ".3f"),
    "peak_mib": ("MiB", ",.0f"),
    "forward_over_best_peer": ("fwd x best", ".2f"),
    "backward_over_best_peer": ("bwd x best", ".2f"),
    "forward_over_proportional": ("fwd / density", ".2f"),
    "backward_over_proportional": ("bwd / density", ".2f"),
    "speedup": ("x dense", ".1f"),
    "paper_speedup": ("paper's", ".1f"),
}
TIMES = ["forward_ms", "backward_ms"]
SPEEDS = ["forward_tflops", "backward_tflops"]
BEST_PEER = ["forward_over_best_peer", "backward_over_best_peer"]
PROPORTION = ["forward_over_proportional", "backward_over_proportional"]
PROPORTION_CAPTION = "/ density: the time over (density x our dense time); 1 is proportional"

Row = dict[str, Any]


# ---- measuring


def speeds(
    attention: Attention, tensors: Tensors, case: Case, *, graphs: bool = False
) -> dict[str, float]:
    """Times of the forward, of the backward alone and of both, TFLOP/s, and peak memory of both.

    `graphs`: both as a CUDA graph too.
    """
    q, k, v, dout = tensors

    def both() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(attention(q, k, v), (q, k, v), dout)

    both()  # what compiles may take memory of its own
    result = {"peak_mib": peak_mib(both)}
    times = {"both": time_ms(both), "forward": time_ms(lambda: attention(q, k, v))}
    if graphs:
        result["both_graph_ms"] = graph_ms(both)
    out = attention(q, k, v)
    times["backward"] = time_ms(
        lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    )
    for part, flops in (("forward", 1.0), ("backward", 2.5), ("both", 3.5)):
        result |= {f"{part}_{key}": x for key, x in times[part].items()}
        result[f"{part}_tflops"] = flops * case.forward_flops / times[part]["ms"] / 1e9
    return result


def measure(
    name: str, case: Case, tensors: Tensors, expected: Answer, *, graphs: bool = False
) -> Row:
    """One row: the case, `status`, the errors, and if the contender is right its speeds.

    `expected` is the answer to `checked_case(name, case)`.
    """
    row: Row = {"name": name, **case.describe()}
    checked = checked_case(name, case)
    try:
        attention = CONTENDERS[name](case, tensors.q.device)
        same = attention if checked == case else CONTENDERS[name](checked, tensors.q.device)
        row["errors"] = errors(same, tensors, expected)
        row["error_budgets"] = expected.budgets
        row["status"] = verdict(row["errors"], expected.budgets)
        if row["status"] == "ok":
            row |= speeds(attention, tensors, case, graphs=graphs)
    except torch.cuda.OutOfMemoryError:
        row["status"] = "out of memory"
    except UnsupportedError as reason:
        row["status"] = f"not supported: {reason}"
    return row


def measure_case(
    case: Case, names: Sequence[str], device: str = "cuda", *, graphs: bool = False
) -> list[Row]:
    """A row for each contender, all on the same tensors; prints each as it comes."""
    tensors = make_tensors(case, device)
    answers: dict[Case, Answer] = {}
    rows = []
    for name in names:
        gc.collect()  # also what a contender left that ran out of memory
        torch.cuda.empty_cache()
        checked = checked_case(name, case)
        if checked not in answers:
            answers[checked] = answer(checked, tensors)
        rows.append(measure(name, case, tensors, answers[checked], graphs=graphs))
        print(progress(rows[-1]), flush=True)
    return rows


def progress(row: Row) -> str:
    """A row in one line."""
    line = f"{heading(row):34} {label(row):24}"
    if row["status"] != "ok":
        return f"{line} {row['status']}"
    forward, backward = row["forward_ms"], row["backward_ms"]
    return f"{line} forward {forward:9.3f} ms, backward {backward:9.3f} ms"


def heading(row: Row) -> str:
    """The problem of a row, its block-sparse mask aside."""
    options = {"causal": row["causal"], "dropout": row["dropout_p"], "padded": row["padded"]}
    size = f"T {row['seq_len']:,}, D {row['head_dim']}"
    return ", ".join([size, *(name for name, on in options.items() if on)])


def label(row: Row) -> str:
    """The contender of a row, with its block-sparse mask."""
    return row["name"] if row["mask"] == "dense" else f"{row['name']}, {row['mask']}"


# ---- peers


def peers(full: bool) -> list[Row]:
    """Dense attention against all contenders, then a full butterfly against FlexAttention."""
    rows = []
    for head_dim in (64, 128):
        for causal in (True, False):
            for seq_len in sorted({*PEER_LENGTHS, *BUTTERFLY_LENGTHS}):
                batch = max(1, 16_384 // seq_len)
                case = Case(batch, seq_len, 2048 // head_dim, head_dim, causal=causal)
                rows += measure_case(case, PEERS if seq_len in PEER_LENGTHS else PEERS[:1])
                if seq_len in BUTTERFLY_LENGTHS:
                    case = replace(case, sparsity=Sparsity("butterfly"))
                    rows += measure_case(case, ["ours", "FlexAttention"])
    add_best_peer(rows)
    add_proportion(rows)
    return rows


def problem(row: Row) -> tuple[Any, ...]:
    """What rows have in common whose contenders computed the same."""
    return (*dense_problem(row), row["sparsity"])


def dense_problem(row: Row) -> tuple[Any, ...]:
    """The same with the block-sparse mask left out."""
    names = ("batch", "seq_len", "n_head", "head_dim", "dtype", "causal", "dropout_p", "padded")
    return tuple(row[name] for name in names)


def our_dense(rows: list[Row]) -> dict[tuple[Any, ...], Row]:
    """Our rows without a block-sparse mask, by `dense_problem`."""
    wanted = ("ours", "dense", "ok")
    found = [row for row in rows if (row["name"], row["mask"], row["status"]) == wanted]
    return {dense_problem(row): row for row in found}


def add_best_peer(rows: list[Row]) -> None:
    """To our rows: our speed over that of the fastest peer, forward and backward by themselves."""
    for row in rows:
        if row["name"] != "ours" or row["status"] != "ok":
            continue
        same = [r for r in rows if r["status"] == "ok" and problem(r) == problem(row)]
        others = [r for r in same if r["name"] != "ours"]
        for part in ("forward", "backward"):
            if others:
                best = min(r[f"{part}_ms"] for r in others)
                row[f"{part}_over_best_peer"] = best / row[f"{part}_ms"]


def add_proportion(rows: list[Row]) -> None:
    """To block-sparse rows: the time over what it would be in proportion to our dense time."""
    dense = our_dense(rows)
    for row in rows:
        base = dense.get(dense_problem(row))
        if row["mask"] == "dense" or row["status"] != "ok" or base is None:
            continue
        for part in ("forward", "backward", "both"):
            share = row["density"] * base[f"{part}_ms"]
            row[f"{part}_over_proportional"] = row[f"{part}_ms"] / share


def show_peers(rows: list[Row]) -> None:
    """Print dense rows, then butterfly rows."""
    dense = [row for row in rows if row["mask"] == "dense"]
    title = "Dense attention, bf16, 16,384 tokens or one sequence, 2,048 channels"
    caption = "x best: our speed over that of the fastest peer"
    show_rows(title, dense, [*SPEEDS, "peak_mib", *BEST_PEER], caption)
    sparse = [row for row in rows if row["mask"] != "dense"]
    title = "Full butterfly of blocks of 128"
    show_rows(title, sparse, [*TIMES, *BEST_PEER, *PROPORTION], PROPORTION_CAPTION)


def draw_peers(rows: list[Row], out: Path) -> None:
    """Draw TFLOP/s of dense attention as bars: a panel for each head dimension, mask and part."""
    # Not at the top: matplotlib takes a second to load, which --help should not wait for.
    from matplotlib.figure import Figure

    rows = [row for row in rows if row["mask"] == "dense" and row["seq_len"] in PEER_LENGTHS]
    panels = list(dict.fromkeys((row["head_dim"], row["causal"]) for row in rows))
    figure = Figure(figsize=(3.4 * len(panels), 6), layout="constrained")
    grid = figure.subplots(2, len(panels), sharey="row", squeeze=False)
    width = 0.8 / len(PEERS)
    for column, (head_dim, causal) in enumerate(panels):
        for line, part in enumerate(("forward", "backward")):
            axes = grid[line, column]
            for number, name in enumerate(PEERS):
                tflops = {
                    row["seq_len"]: row.get(f"{part}_tflops", 0.0)
                    for row in rows
                    if (row["name"], row["head_dim"], row["causal"]) == (name, head_dim, causal)
                }
                places = [group + (number + 0.5) * width - 0.4 for group in range(len(tflops))]
                axes.bar(places, list(tflops.values()), 0.92 * width, label=name)
            lengths = sorted({row["seq_len"] for row in rows})
            axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
            axes.set_title(f"{part}, head_dim {head_dim}, {'causal' if causal else 'full'}", size=9)
    for axes in grid[:, 0]:
        axes.set_ylabel("TFLOP/s")
    for axes in grid[1]:
        axes.set_xlabel("tokens")
    handles, names = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=len(PEERS), fontsize=8)
    save(figure, out)


# ---- paper


def paper_sparsity(seq_len: int) -> Sparsity:
    """256 keys a row, or an eighth of them, as the paper's times suggest for its benchmark.

    From 2,048 tokens on that is each block of 128 and one partner, otherwise a block by itself.
    """
    if seq_len >= 2048:
        return Sparsity("butterfly", 1, 128)
    return Sparsity("butterfly", 0, max(16, seq_len // 8))


def paper(full: bool) -> list[Row]:
    """Standard attention, SDPA, ours dense and ours block-sparse, as in Appendix E."""
    rows = []
    for variant, options in PAPER_VARIANTS.items():
        lengths = PAPER_LENGTHS if full or variant == "plain" else VARIANT_LENGTHS
        for seq_len in lengths:
            case = Case(16, seq_len, 8, 64, torch.float16, **options)
            sparse = replace(case, sparsity=paper_sparsity(seq_len))
            graphs = seq_len <= GRAPH_LIMIT
            here = measure_case(case, ["standard", "SDPA flash", "ours"], graphs=graphs)
            here += measure_case(sparse, ["ours"], graphs=graphs)
            rows += [{"variant": variant, **row} for row in here]
    add_speedup(rows)
    return rows


def add_speedup(rows: list[Row]) -> None:
    """To our block-sparse rows: how much faster than dense, forward and backward; the paper's.

    As graphs where both were timed so.
    """
    ms = zip(PAPER_LENGTHS, PAPER_DENSE_MS, PAPER_SPARSE_MS, strict=True)
    paper_speedup = {seq_len: dense / sparse for seq_len, dense, sparse in ms}
    dense = our_dense(rows)
    for row in rows:
        base = dense.get(dense_problem(row))
        if row["mask"] == "dense" or row["status"] != "ok" or base is None:
            continue
        key = "both_graph_ms" if "both_graph_ms" in row else "both_ms"
        row["speedup"] = base[key] / row[key]
        if row["variant"] == "plain":
            row["paper_speedup"] = paper_speedup[row["seq_len"]]


def show_paper(rows: list[Row]) -> None:
    """Print the rows of each variant."""
    columns = [*TIMES, "both_ms", "both_graph_ms", "peak_mib", "speedup", "paper_speedup"]
    caption = "x dense: ours block-sparse over ours dense, both passes; the paper's: Table 20, A100"
    for variant in PAPER_VARIANTS:
        here = [row for row in rows if row["variant"] == variant]
        show_rows(f"{variant}: batch 16, 8 heads of 64, fp16, not causal", here, columns, caption)


def draw_paper(rows: list[Row], out: Path) -> None:
    """Draw time and memory against length, as Figure 3 does, for the plain variant.

    Times are of CUDA graphs where they were taken.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    time, memory = figure.subplots(1, 2)
    rows = [row for row in rows if row["variant"] == "plain" and row["status"] == "ok"]
    for name, sparse in dict.fromkeys((row["name"], row["mask"] != "dense") for row in rows):
        line = [row for row in rows if (row["name"], row["mask"] != "dense") == (name, sparse)]
        lengths = [row["seq_len"] for row in line]
        label = f"{name}, block-sparse" if sparse else name
        ms = [row.get("both_graph_ms", row["both_ms"]) for row in line]
        time.plot(lengths, ms, "o-", ms=3, label=label)
        memory.plot(lengths, [row["peak_mib"] for row in line], "o-", ms=3, label=label)
    time.set_ylabel("forward and backward, ms")
    memory.set_ylabel("peak memory, MiB")
    for axes in (time, memory):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("tokens")
    time.legend(fontsize=8)
    save(figure, out)


# ---- sparsity


def sparsity(full: bool) -> list[Row]:
    """Ours at 4,096 tokens in blocks of 128: butterflies and windows from sparse to dense."""
    case = Case(4, 4096, 32, 64)
    masks: list[Sparsity | None] = [None]
    masks += [Sparsity("butterfly", n_factors) for n_factors in range(6)]
    masks += [Sparsity("window", width) for width in (2, 3, 5, 9, 17)]
    rows = [row for mask in masks for row in measure_case(replace(case, sparsity=mask), ["ours"])]
    add_proportion(rows)
    return rows


def show_sparsity(rows: list[Row]) -> None:
    """Print the rows by density."""
    rows = sorted(rows, key=lambda row: row["density"])
    title = "T 4,096, batch 4, 32 heads of 64, bf16, not causal, blocks of 128"
    show_rows(title, rows, ["density", *TIMES, *PROPORTION], PROPORTION_CAPTION)


def draw_sparsity(rows: list[Row], out: Path) -> None:
    """Draw time against density, with the line of proportionality."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    rows = [row for row in rows if row["status"] == "ok"]
    for axes, part in zip(figure.subplots(1, 2), ("forward", "backward"), strict=True):
        for pattern in ("butterfly", "window", "dense"):
            points = [row for row in rows if row["mask"].startswith(pattern)]
            times = [row[f"{part}_ms"] for row in points]
            axes.plot([row["density"] for row in points], times, "o", ms=4, label=pattern)
        for row in rows:
            if row["mask"] == "dense":
                line = [0, row[f"{part}_ms"]]
                axes.plot([0, 1], line, "k:", lw=1, label="density x dense time")
        axes.set_xlabel("density, share of the blocks")
        axes.set_ylabel(f"{part}, ms")
        axes.set_ylim(bottom=0)
    figure.axes[0].legend(fontsize=8)
    save(figure, out)


# ---- all presets


def io(full: bool) -> list[Row]:
    """Bytes to and from HBM, with times beside them: scripts/attention_io.py."""
    rows = {}
    for name, case in attention_io.CASES.items():
        (rows[name],) = measure_case(case, [attention_io.contender(name)])
    gc.collect()  # the profiled runs are processes of their own, on the same GPU
    torch.cuda.empty_cache()
    return attention_io.with_bytes(rows)


def show_rows(title: str, rows: list[Row], columns: Sequence[str], caption: str) -> None:
    """Print rows, with those of COLUMNS. What is not "ok" says so, and has no numbers."""
    table = Table(title=title, caption=caption)
    table.add_column("", no_wrap=True)
    for key in columns:
        table.add_column(COLUMNS[key][0], justify="right")
    table.add_column("error")
    last = None
    for row in rows:
        if (here := heading(row)) != last:
            table.add_section()
            table.add_row(f"[bold]{here}")
            last = here
        right = row["status"] == "ok"
        table.add_row(
            f"  {label(row)}",
            *(format(row[key], COLUMNS[key][1]) if right and key in row else "" for key in columns),
            f"{max(row['errors'].values()):.1e}" if right else row["status"],
        )
    Console(width=110).print(table)


def save(figure: Any, out: Path) -> None:
    """Write a figure."""
    figure.savefig(out, dpi=120)
    print(f"drew {out}")


class Preset(NamedTuple):
    """What a preset does: measure (with --full or without), print, draw."""

    measure: Callable[[bool], list[Row]]
    show: Callable[[list[Row]], None]
    draw: Callable[[list[Row], Path], None]


PRESETS = {
    "peers": Preset(peers, show_peers, draw_peers),
    "paper": Preset(paper, show_paper, draw_paper),
    "sparsity": Preset(sparsity, show_sparsity, draw_sparsity),
    "io": Preset(io, attention_io.show, attention_io.draw),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.benchmark_attention",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--preset", choices=PRESETS, required=True)
    parser.add_argument("--full", action="store_true", help="paper: all lengths of all variants")
    parser.add_argument("--out", type=Path, help="default: docs/results/attention_PRESET.json")
    parser.add_argument("--one-run", metavar="CASE/PART", help="io: what the profiler looks at")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise SystemExit("benchmark_attention measures a GPU, and PyTorch sees none")
    if args.one_run:
        return attention_io.one_run(args.one_run)
    preset = PRESETS[args.preset]
    rows = preset.measure(args.full)
    preset.show(rows)
    out = args.out or Path(f"docs/results/attention_{args.preset}.json")
    write_result(out, {"preset": args.preset, "rows": rows})
    preset.draw(rows, out.with_suffix(".png"))
    if wrong := [row for row in rows if row["status"].startswith("wrong")]:
        raise SystemExit(f"{len(wrong)} of {len(rows)} results are wrong, and have no speed")


if __name__ == "__main__":
    main()
