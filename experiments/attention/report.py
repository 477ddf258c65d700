"""The rows of experiments.attention: compared, on the terminal, in tables of pages, and drawn."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from evaluation.results import Row
from evaluation.style import PLAIN, name_ends
from experiments.reports import table
from experiments.style import OUR_SPARSE, OURS, line_of

PASSES = ("forward", "backward")

# ---- rows beside each other


def dense_problem(row: Row) -> tuple[Any, ...]:
    """What rows have in common that differ in contender and block-sparse mask alone."""
    names = ("batch", "seq_len", "n_head", "head_dim", "dtype", "causal", "dropout_p", "padded")
    return tuple(row[name] for name in names)


def _right(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row["status"] == "ok"]


def _add_to_ours(rows: list[Row], key: str, is_peer: Callable[[str], bool]) -> None:
    """To our rows: the time of the fastest peer over ours, forward and backward by themselves."""
    right = _right(rows)
    for row in (row for row in right if row["name"] == "ours"):
        problem = (*dense_problem(row), row["sparsity"])
        peers = [r for r in right if (*dense_problem(r), r["sparsity"]) == problem]
        peers = [peer for peer in peers if is_peer(peer["name"])]
        for part in PASSES if peers else ():
            best = min(peer[f"{part}_ms"] for peer in peers)
            row[f"{part}_{key}"] = best / row[f"{part}_ms"]


def add_best_peer(rows: list[Row]) -> None:
    """To our rows: our speed over that of the fastest peer, forward and backward by themselves."""
    _add_to_ours(rows, "over_best_peer", lambda name: not name.startswith("ours"))


def beside_dense(rows: list[Row]) -> Iterator[tuple[Row, Row]]:
    """Block-sparse rows, each with our dense row of its problem."""
    right = _right(rows)
    dense = {dense_problem(r): r for r in right if (r["name"], r["mask"]) == ("ours", "dense")}
    for row in right:
        if row["mask"] != "dense" and dense_problem(row) in dense:
            yield row, dense[dense_problem(row)]


def add_proportion(rows: list[Row]) -> None:
    """To block-sparse rows: the time over what it would be in proportion to our dense time."""
    for row, dense in beside_dense(rows):
        for part in (*PASSES, "both"):
            share = row["density"] * dense[f"{part}_ms"]
            row[f"{part}_over_proportional"] = row[f"{part}_ms"] / share


def relate_butterflies(rows: list[Row]) -> None:
    """Add what compares rows of --preset butterfly: the best peer, and proportion to density."""
    add_best_peer(rows)
    add_proportion(rows)


def add_portable(rows: list[Row]) -> None:
    """To all rows their block size; to ours how much longer the portable kernels take."""
    for row in rows:
        row["block_size"] = row["sparsity"]["block_size"]
    _add_to_ours(rows, "portable_over_ours", lambda name: name == "ours, portable")


# ---- on the terminal


def heading(row: Row) -> str:
    """The problem of a row, its block-sparse mask aside."""
    options = {"causal": row["causal"], "dropout": row["dropout_p"], "padded": row["padded"]}
    size = f"T {row['seq_len']:,}, D {row['head_dim']}"
    return ", ".join([size, *(name for name, on in options.items() if on)])


def label(row: Row) -> str:
    """The contender of a row, with its block-sparse mask."""
    return row["name"] if row["mask"] == "dense" else f"{row['name']}, {row['mask']}"


def _text(rows: list[Row], columns: list[str]) -> str:
    """The `columns` of rows that are right, and of others what is wrong."""
    frame = pd.DataFrame(rows).reindex(columns=["status", *columns])
    frame.insert(0, "problem", [heading(row) for row in rows])
    frame.insert(1, "contender", [label(row) for row in rows])
    frame.columns = frame.columns.str.replace("forward", "fwd").str.replace("backward", "bwd")
    return frame.to_string(index=False, na_rep="", float_format="{:,.4g}".format)


# The rows of a preset as the terminal shows them
_TIMES = ["forward_ms", "backward_ms"]
_PROPORTION = ["forward_over_proportional", "backward_over_proportional"]
_BEST_PEER = ["forward_over_best_peer", "backward_over_best_peer"]
_PORTABLE = ["forward_portable_over_ours", "backward_portable_over_ours"]
peers_text = partial(_text, columns=["forward_tflops", "backward_tflops", "peak_mib", *_BEST_PEER])
butterfly_text = partial(_text, columns=[*_TIMES, "peak_mib", *_BEST_PEER, *_PROPORTION])
blocks_text = partial(_text, columns=["block_size", *_TIMES, *_PORTABLE])
sparsity_text = partial(_text, columns=["density", *_TIMES, *_PROPORTION])
paper_text = partial(
    _text, columns=[*_TIMES, "both_ms", "both_eager_ms", "peak_mib", "speedup", "paper_speedup"]
)


# ---- in pages


def dense_table(result: Row) -> str:
    """Dense attention, ours and others' (--preset peers), in TFLOP/s."""
    lines: dict[tuple[Any, ...], dict[str, str]] = {}
    for row in result["rows"]:
        if row["mask"] == "dense":
            line = lines.setdefault(dense_problem(row), _problem(row))
            line[row["name"]] = _both(row, "tflops", ".0f")
    return table(line for line in lines.values() if len(line) > 4)  # a peer beside ours


def direction_table(result: Row, *, direction: str) -> str:
    """One direction, "forward" or "backward", of dense attention (--preset peers --against ...), in
    TFLOP/s; ours to the best peer's."""
    lines: dict[tuple[Any, ...], dict[str, str]] = {}
    for row in result["rows"]:
        line = lines.setdefault(dense_problem(row), _problem(row))
        line[row["name"]] = f"{row[f'{direction}_tflops']:.0f}"
    for row in result["rows"]:
        if row["name"] == "ours":
            ratio = f"{row[f'{direction}_over_best_peer']:.3f}"
            lines[dense_problem(row)]["ours / best"] = ratio
    return table(lines.values())


def butterfly_table(result: Row) -> str:
    """A full butterfly by all that take one (--preset butterfly); forward / backward."""
    lines: dict[tuple[Any, ...], dict[str, str]] = {}
    for row in result["rows"]:
        if row["mask"] != "butterfly":
            continue
        line = lines.setdefault(dense_problem(row), _problem(row))
        line[f"{row['name']}, ms"] = _both(row, "ms", ".2f")
        if row["name"] == "ours" and "forward_over_proportional" in row:
            line["ours / (density x our dense time)"] = _both(row, "over_proportional", ".2f")
            line["best peer / ours"] = _both(row, "over_best_peer", ".2f")
    return table(line for line in lines.values() if len(line) > 4)  # a peer beside ours


def mask_price_table(result: Row) -> str:
    """What a mask costs that hides nothing, or one block (--preset butterfly)."""
    price = "time / (density x our dense time)"
    return table(
        _problem(row) | {"blocks": row["mask"], price: _both(row, "over_proportional", ".3f")}
        for row in result["rows"]
        if row["mask"].startswith("all")
    )


def blocks_table(result: Row) -> str:
    """Butterflies in blocks of several sizes (--preset blocks); forward / backward."""
    lines: dict[tuple[Any, ...], dict[str, str]] = {}
    for row in result["rows"]:
        problem = _problem(row) | {"blocks of": str(row["block_size"])}
        line = lines.setdefault((*dense_problem(row), row["block_size"]), problem)
        line[f"{row['name']}, ms"] = _both(row, "ms", ".2f")
        if "forward_portable_over_ours" in row:
            line["portable / ours"] = _both(row, "portable_over_ours", ".2f")
    return table(lines.values())


def paper_table(result: Row) -> str:
    """The paper's Figure 3 (--preset paper)."""
    lines: dict[int, dict[str, str]] = {}
    for row in result["rows"]:
        if row["variant"] != "plain":
            continue
        line = lines.setdefault(row["seq_len"], {"tokens": f"{row['seq_len']:,}"})
        name = row["name"] if row["mask"] == "dense" else "ours, block-sparse"
        line[name] = row["status"]
        if row["status"] == "ok":
            line[name] = f"{row['both_ms']:,.2f} ms, {row['peak_mib']:,.0f} MiB"
        if row["mask"] != "dense":
            line["speed-up over dense"] = f"{row['speedup']:.1f}"
            line["the paper's"] = f"{row['paper_speedup']:.1f}"
    return table(lines.values())


def _problem(row: Row) -> dict[str, str]:
    mask = "causal" if row["causal"] else "full"
    return {"head_dim": str(row["head_dim"]), "mask": mask, "tokens": f"{row['seq_len']:,}"}


def _both(row: Row, what: str, how: str) -> str:
    """A number of the forward and of the backward pass."""
    if row["status"] != "ok":
        return row["status"].split(":")[0]
    return " / ".join(format(row[f"{part}_{what}"], how) for part in PASSES)


# ---- drawn


def draw_peers(rows: list[Row]) -> Figure:
    """TFLOP/s of dense attention over length: a panel for each pass, mask and head dimension.

    Lengths at which ours ran alone are left out; a cross is where memory did not suffice.
    """
    return _over_length([row for row in rows if row["mask"] == "dense"], "tflops", "TFLOP/s")


def draw_butterflies(rows: list[Row]) -> Figure:
    """Time of a full butterfly over length, in that which is in proportion to our dense time."""
    butterflies = [
        row
        for row in rows
        if row["mask"] == "butterfly"  # of the longest there is no dense time
        and (row["status"] != "ok" or "forward_over_proportional" in row)
    ]
    return _over_length(butterflies, "over_proportional", "time / proportional")


def _over_length(rows: list[Row], what: str, unit: str) -> Figure:
    """A number of each pass over length, of all lengths at which some peer ran."""
    lengths = sorted({row["seq_len"] for row in rows if row["name"] != "ours"})
    rows = [row for row in rows if row["seq_len"] in lengths]
    panels = sorted({(not row["causal"], row["head_dim"]) for row in rows})
    figure = Figure(figsize=(9.5, 6), layout="constrained")
    grid = figure.subplots(2, len(panels), sharex=True, sharey=True, squeeze=False)
    lines = {}
    for column, (full, head_dim) in zip(grid.T, panels, strict=True):
        some = [r for r in rows if (not r["causal"], r["head_dim"]) == (full, head_dim)]
        column[0].set_title(f"{'full' if full else 'causal'}, head_dim {head_dim}", size=10)
        for axes, part in zip(column, PASSES, strict=True):
            for name in dict.fromkeys(row["name"] for row in some):
                of, look = [row for row in some if row["name"] == name], line_of(name)
                lines[name] = _plot(axes, _right(of), f"{part}_{what}", look)
                for row in (row for row in of if row["status"] == "out of memory"):
                    at, colour = (row["seq_len"], 0), look["color"]
                    axes.plot(*at, "x", ms=7, mew=2, color=colour, clip_on=False)
                    above = {"xytext": (0, 7), "textcoords": "offset points", "ha": "center"}
                    axes.annotate("OOM", at, **above, fontsize=8, color=colour)
            axes.margins(x=0.1)
            _over_lengths(axes, lengths)
    grid[0, 0].set_ylim(bottom=0)
    figure.supxlabel("tokens", size=10)
    for part, axes in zip(PASSES, grid[:, 0], strict=True):
        axes.set_ylabel(f"{part}, {unit}")
    figure.legend(lines.values(), lines, loc="outside upper center", ncols=4, frameon=False)
    return figure


def _plot(axes: Axes, rows: list[Row], key: str, look: dict[str, Any]) -> Line2D:
    """The line of a number of rows over their length."""
    x, y = ([row[what] for row in rows] for what in ("seq_len", key))
    return axes.plot(x, y, marker="o", ms=4, **look)[0]


def _over_lengths(axes: Axes, lengths: list[int]) -> None:
    """Make x a logarithmic axis of these lengths."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{n // 1024}K" if n >= 1024 else str(n) for n in lengths])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(alpha=0.3)


def draw_paper(rows: list[Row]) -> Figure:
    """Time and memory against length, as Figure 3 has them, for the plain variant."""
    lines: dict[tuple[str, bool], list[Row]] = {}
    ends_early = set()
    for row in rows:
        line = row["name"], row["mask"] != "dense"
        if row["variant"] == "plain" and row["status"] == "ok":
            lines.setdefault(line, []).append(row)
        elif row["status"] == "out of memory":
            ends_early.add(line)
    figure = Figure(figsize=(8.5, 4), layout="constrained")
    panels = {"both_ms": "forward and backward, ms", "peak_mib": "peak memory, MiB"}
    for axes, (key, title) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        ends = {}
        for (name, sparse), line in lines.items():
            look = line_of(name, sparse=sparse)
            _plot(axes, line, key, look)
            name += ",\nblock-sparse" if sparse else ",\nthen OOM" * ((name, sparse) in ends_early)
            ends[name] = line[-1][key], look["color"]
        axes.set_yscale("log")
        _over_lengths(axes, sorted({r["seq_len"] for line in lines.values() for r in line})[::3])
        axes.set_title(title, size=10)
        axes.set_xlabel("tokens")
        name_ends(axes, ends, gap=0.09)
    return figure


def draw_sparsity(rows: list[Row]) -> Figure:
    """Time against density, with the line of proportionality."""
    looks = {"dense": ("o", OURS), "butterfly": ("o", OUR_SPARSE), "window": ("^", OUR_SPARSE)}
    figure = Figure(figsize=(8.5, 3.8), layout="constrained")
    for axes, part in zip(figure.subplots(1, 2), PASSES, strict=True):
        for pattern, (marker, colour) in looks.items():
            some = [row for row in _right(rows) if row["mask"].split()[0] == pattern]
            x, y = ([row[what] for row in some] for what in ("density", f"{part}_ms"))
            axes.plot(x, y, marker, color=colour, ms=7, label=f"ours, {pattern}")
            if pattern == "dense" and some:
                axes.plot([0, 1], [0, y[0]], ":", color=PLAIN, label="in proportion to density")
        axes.set(xlabel="density, share of the blocks", ylabel=f"{part}, ms")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.axes[0].legend(frameon=False)
    return figure
