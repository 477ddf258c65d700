"""HBM traffic of attention, counted and measured: the paper's Figure 2, left.

`python -m experiments.attention --preset io`. The counts follow arXiv 2205.14135, section 3.2, with
the constants of the kernels that run here. X is the size of q, k, v or out, and L of lse or delta:

    standard      Each PyTorch operation reads its inputs and writes its outputs once. Its T x T
                  matrices make that Theta(T D + T^2).
    ours, forward           2 X + L + 2 X passes(BLOCK_M): q and out once, k and v once for each
                            tile of queries
    ours, backward, dq      4 X + 3 L + 2 X passes(BLOCK_M): q, out and dout once, and dq
                    dk, dv  4 X + (2 X + 2 L) passes(BLOCK_N)

passes(n) = density T / n: Theorem 2, whose tile size is the capacity of SRAM, and Proposition 4.
This counts the tile loads. Most of them hit the L2 cache, which the theory ignores. `minimum` is
the same count with one pass: each kernel reads each byte from HBM only once.

Nsight Compute measures the traffic and flushes the caches before each kernel. Bytes that a kernel
leaves in the L2 cache at its end count as not written, at most its size (50 MB on an H100).
"""

import csv
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from evaluation.markdown import dict_table
from evaluation.results import Row
from evaluation.style import PLAIN
from experiments.attention.cases import Case, Sparsity, Tensors, make_tensors
from experiments.attention.peers import CONTENDERS, PORTABLE
from experiments.reports import display_name
from experiments.style import OUR_SPARSE, OURS
from kernels.options import AttentionOptions, with_mask
from kernels.triton.tuning import backward_dkdv_tiles, backward_dq_tiles, forward_tiles

PARTS = ("forward", "backward")
METRICS = {"dram__bytes_read.sum": "read_bytes", "dram__bytes_write.sum": "written_bytes"}
UNITS = {"byte": 1, "Kbyte": 10**3, "Mbyte": 10**6, "Gbyte": 10**9}
PAPER_GB = {"standard": 40.3, "FlashAttention": 4.4}  # Figure 2, left: A100, forward and backward

# GPT-2 medium's, as in the paper
CASES = {
    "standard": Case(64, 1024, 16, 64, torch.float16),
    "ours": Case(64, 1024, 16, 64, torch.float16),
    "ours, butterfly": Case(64, 1024, 16, 64, torch.float16, sparsity=Sparsity("butterfly")),
}


def contender(name: str) -> str:
    """Key of CONTENDERS for a key of CASES: the bytes of the portable kernels are counted."""
    return PORTABLE if name.startswith("ours") else name


# ---- counts


class CountBytes(TorchDispatchMode):
    """Count the bytes that PyTorch operations read and write, each input and output once."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation and count its bytes, unless it is a view."""
        result = func(*args, **(kwargs or {}))
        if not func.is_view and func is not torch.ops.aten._unsafe_view.default:
            tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor)]
            self.bytes += sum(x.numel() * x.element_size() for x in tensors)
        return result


def standard_bytes(case: Case) -> dict[str, int]:
    """Bytes of standard attention by part, from a run on meta tensors."""
    shape = (case.batch, case.seq_len, case.n_head, case.head_dim)
    empty = partial(torch.empty, shape, dtype=case.dtype, device="meta")
    q, k, v = (empty(requires_grad=True) for _ in range(3))
    tensors = Tensors(q, k, v, empty())
    counted = {}
    for part in PARTS:
        run = part_of_a_run("standard", case, tensors, part)
        with CountBytes() as count:
            run()
        counted[part] = count.bytes
    return counted


def flash_bytes(
    case: Case, *, block_m_fwd: int, block_m_dq: int, block_n_dkdv: int
) -> dict[str, dict[str, float]]:
    """Bytes of Papilio's kernels by part: `loaded` by all tiles, and the `minimum`."""
    rows = case.batch * case.n_head * case.seq_len
    X, L = rows * case.head_dim * case.dtype.itemsize, rows * 4

    def total(passes: Callable[[int], float]) -> dict[str, float]:
        return {
            "forward": 2 * X + L + 2 * X * passes(block_m_fwd),
            "backward": (4 * X + 3 * L + 2 * X * passes(block_m_dq))
            + (4 * X + (2 * X + 2 * L) * passes(block_n_dkdv)),
        }

    loaded = total(lambda block: case.density * -(-case.seq_len // block))
    minimum = total(lambda block: 1.0)
    return {part: {"loaded": loaded[part], "minimum": minimum[part]} for part in PARTS}


def our_tiles(case: Case, device: torch.device | str) -> dict[str, int]:
    """Tile sizes of `case` on a device, as keyword arguments of `flash_bytes`."""
    shape = (case.batch, case.seq_len, case.n_head, case.head_dim)
    q = torch.empty((), dtype=case.dtype, device=device).expand(shape)
    options = AttentionOptions(causal=case.causal)
    if case.sparsity is not None:
        options = with_mask(options, case.sparsity.mask(case.seq_len), q, q, "triton")
    return {
        "block_m_fwd": forward_tiles(q, q, options).block_m,
        "block_m_dq": backward_dq_tiles(q, q, options).block_m,
        "block_n_dkdv": backward_dkdv_tiles(q, q, options).block_n,
    }


# ---- measurements


def part_of_a_run(name: str, case: Case, tensors: Tensors, part: str) -> Callable[[], object]:
    """Return a function that runs the forward or backward pass of one of CASES."""
    q, k, v, dout = tensors
    attention = CONTENDERS[contender(name)](case, q.device)
    if part == "forward":
        return lambda: attention(q, k, v)
    out = attention(q, k, v)
    return lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)


def one_run(name: str) -> None:
    """Run "CASE/PART" twice and profile the second run, when everything is compiled."""
    case_name, part = name.split("/")
    case = CASES[case_name]
    run = part_of_a_run(case_name, case, make_tensors(case), part)
    run()
    torch.cuda.synchronize()
    with torch.cuda.profiler.profile():
        run()
        torch.cuda.synchronize()


def profile(name: str) -> dict[str, Any]:
    """Measure "CASE/PART" with Nsight Compute: bytes and kernels, or the reason of failure."""
    if shutil.which("ncu") is None:
        return {"profiler": "ncu (Nsight Compute) is not on the PATH"}
    # Leave the clocks alone: bytes do not depend on them.
    command = ["ncu", "--clock-control", "none", "--profile-from-start", "off"]
    command += ["--metrics", ",".join(METRICS), "--csv", "--target-processes", "all"]
    command += [sys.executable, "-m", "experiments.attention", "--preset", "io"]
    ran = subprocess.run([*command, "--one-run", name], capture_output=True, text=True)
    if ran.returncode != 0:
        output = (ran.stdout + ran.stderr).strip().splitlines()
        errors = [line for line in output if line.startswith("==ERROR==")] or output[-1:]
        return {"profiler": f"ncu failed ({ran.returncode}): {' '.join(errors)}"}
    measured = parse_ncu(ran.stdout)
    return measured or {"profiler": "ncu saw no kernel"}


def parse_ncu(text: str) -> dict[str, int]:
    """Sum the METRICS over all kernels in the output of `ncu --csv`; {} if there are none.

    Raises:
        ValueError: a metric is missing or has an unknown unit.
    """
    # Messages of ncu and of the program come before the table, which quotes every field.
    lines = [line for line in text.splitlines() if line.startswith('"')]
    totals: dict[str, int] = {}
    kernels = set()
    for row in csv.DictReader(lines):
        metric = METRICS.get(row["Metric Name"])
        value = row["Metric Value"].replace(",", "")
        unit = row["Metric Unit"]
        if metric is None or unit not in UNITS or not value.replace(".", "", 1).isdecimal():
            raise ValueError(
                f"cannot read the output of ncu: {row['Metric Name']} = {value!r} {unit!r}"
            )
        totals[metric] = totals.get(metric, 0) + round(float(value) * UNITS[unit])
        kernels.add(row["ID"])
    if totals and set(totals) != set(METRICS.values()):
        raise ValueError(
            f"ncu measured {sorted(totals)}, which must be all of {sorted(METRICS.values())}"
        )
    return {**totals, "kernels": len(kernels)} if totals else {}


# ---- preset


def with_bytes(rows: dict[str, Row], device: str = "cuda") -> list[Row]:
    """Add the counted and measured bytes of each part to the rows of CASES."""
    results = []
    for name, row in rows.items():
        case = CASES[name]
        if name == "standard":
            counted = {p: {"loaded": x, "minimum": x} for p, x in standard_bytes(case).items()}
        else:
            counted = flash_bytes(case, **our_tiles(case, device))
        measured = {part: profile(f"{name}/{part}") for part in PARTS}
        results.append({**row, "name": name, "bytes": {p: counted[p] | measured[p] for p in PARTS}})
        print(f"{name}: {measured}", flush=True)
    return results


def text(rows: list[Row]) -> str:
    """Format counted and measured GB, with the times."""

    def line(row: Row, part: str) -> dict[str, str]:
        moved = row["bytes"][part]
        bytes_moved = {
            **{"minimum": moved["minimum"], "tile loads": moved["loaded"]},
            **{"read": moved.get("read_bytes"), "written": moved.get("written_bytes")},
            "measured": _measured(moved),
        }
        notes = {moved.get("profiler"), row["status"]} - {None, "ok"}
        return {
            "implementation": display_name(row["name"]),
            "part": part,
            **{key: "-" if x is None else f"{x / 1e9:.2f}" for key, x in bytes_moved.items()},
            "ms": f"{row[f'{part}_ms']:.2f}" if row["status"] == "ok" else "-",
            "note": "; ".join(notes),
        }

    paper = ", ".join(f"{name} {gb} GB" for name, gb in PAPER_GB.items())
    return (
        "HBM traffic in GB: T 1,024, batch 64, 16 heads of 64, fp16, not causal\n\n"
        f"{dict_table(line(row, part) for row in rows for part in PARTS)}\n"
        f"paper, forward and backward on an A100: {paper}"
    )


def draw(rows: list[Row]) -> Figure:
    """Draw GB of both passes as bars: measured, and counted in two ways."""
    kinds = {"measured": 1.0, "counted, each byte once": 0.55, "counted, tile loads": 0.25}
    colours = {"standard": PLAIN, "ours": OURS, "ours, butterfly": OUR_SPARSE}
    figure = Figure(figsize=(8.5, 4), layout="constrained")
    for axes, part in zip(figure.subplots(1, 2, sharey=True), PARTS, strict=True):
        for line, row in enumerate(rows):
            moved = row["bytes"][part]
            counts = (_measured(moved), moved["minimum"], moved["loaded"])
            colour = colours[row["name"]]
            for number, (n_bytes, alpha) in enumerate(zip(counts, kinds.values(), strict=True)):
                if n_bytes is not None:
                    y = line + 0.27 * (number - 1)
                    bar = axes.barh(y, n_bytes / 1e9, 0.25, alpha=alpha, color=colour)
                    axes.bar_label(bar, fmt="%.1f", fontsize=9, padding=2)
        axes.set_title(part, size=10)
        axes.set_xlabel("HBM traffic, GB")
        axes.margins(x=0.12)
        axes.spines[["right", "top"]].set_visible(False)
    first = figure.axes[0]
    first.set_yticks(
        range(len(rows)), [display_name(row["name"]).replace(", ", ",\n") for row in rows]
    )
    first.invert_yaxis()
    handles = [first.barh(0, 0, color="black", alpha=alpha, label=n) for n, alpha in kinds.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=3, frameon=False)
    return figure


def _measured(moved: dict[str, Any]) -> int | None:
    """Bytes read and written; None without a profiler."""
    return sum(moved[key] for key in METRICS.values()) if "read_bytes" in moved else None
