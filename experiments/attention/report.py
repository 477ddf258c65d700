"""What the rows of experiments.attention say: beside each other, on the terminal, in pages, drawn.

pandas and matplotlib take a second to load, which --help should not wait for: each function loads
what it needs.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from evaluation.results import Row
from evaluation.style import save
from experiments.reports import table

Result = Mapping[str, Any]

PASSES = ("forward", "backward")

# What the terminal shows of a row beside its problem and contender, by preset
TIMES = ["forward_ms", "backward_ms"]
PROPORTION = ["forward_over_proportional", "backward_over_proportional"]
BEST_PEER = ["forward_over_best_peer", "backward_over_best_peer"]
PEERS = ["forward_tflops", "backward_tflops", "peak_mib", *BEST_PEER, *PROPORTION]
PAPER = [*TIMES, "both_ms", "both_eager_ms", "peak_mib", "speedup", "paper_speedup"]
SPARSITY = ["density", *TIMES, *PROPORTION]


# ---- rows beside each other


def dense_problem(row: Row) -> tuple[Any, ...]:
    """What rows have in common that differ in contender and block-sparse mask alone."""
    names = ("batch", "seq_len", "n_head", "head_dim", "dtype", "causal", "dropout_p", "padded")
    return tuple(row[name] for name in names)


def add_best_peer(rows: list[Row]) -> None:
    """To our rows: our speed over that of the fastest peer, forward and backward by themselves."""
    right = [row for row in rows if row["status"] == "ok"]
    for row in right:
        problem = (*dense_problem(row), row["sparsity"])
        peers = [
            r
            for r in right
            if (*dense_problem(r), r["sparsity"]) == problem and r["name"] != "ours"
        ]
        if row["name"] == "ours" and peers:
            for part in PASSES:
                best = min(peer[f"{part}_ms"] for peer in peers)
                row[f"{part}_over_best_peer"] = best / row[f"{part}_ms"]


def beside_dense(rows: list[Row]) -> Iterator[tuple[Row, Row]]:
    """Block-sparse rows, each with our dense row of its problem."""
    right = [row for row in rows if row["status"] == "ok"]
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


def relate_peers(rows: list[Row]) -> None:
    """Add what compares rows of --preset peers: the best peer, and proportion to density."""
    add_best_peer(rows)
    add_proportion(rows)


# ---- on the terminal


def heading(row: Row) -> str:
    """The problem of a row, its block-sparse mask aside."""
    options = {"causal": row["causal"], "dropout": row["dropout_p"], "padded": row["padded"]}
    size = f"T {row['seq_len']:,}, D {row['head_dim']}"
    return ", ".join([size, *(name for name, on in options.items() if on)])


def label(row: Row) -> str:
    """The contender of a row, with its block-sparse mask."""
    return row["name"] if row["mask"] == "dense" else f"{row['name']}, {row['mask']}"


def show(rows: list[Row], columns: list[str]) -> None:
    """Print the `columns` of rows that are right, and of others what is wrong."""
    import pandas as pd

    frame = pd.DataFrame(rows).reindex(columns=["status", *columns])
    frame.insert(0, "problem", [heading(row) for row in rows])
    frame.insert(1, "contender", [label(row) for row in rows])
    frame.columns = frame.columns.str.replace("forward", "fwd").str.replace("backward", "bwd")
    print(frame.to_string(index=False, na_rep="", float_format="{:,.4g}".format))


# ---- in pages


def dense_table(result: Result) -> str:
    """Dense attention, ours and others' (--preset peers), in TFLOP/s."""
    lines: dict[tuple[Any, ...], dict[str, str]] = {}
    for row in result["rows"]:
        if row["mask"] == "dense":
            line = lines.setdefault(dense_problem(row), _problem(row))
            line[row["name"]] = _both(row, "tflops", ".0f")
    return table(line for line in lines.values() if len(line) > 4)  # a peer beside ours


def butterfly_table(result: Result) -> str:
    """A full butterfly, ours and FlexAttention's (--preset peers)."""
    rows = [row for row in result["rows"] if row["mask"] != "dense"]
    flex = {dense_problem(row): row for row in rows if row["name"] == "FlexAttention"}
    return table(
        {
            **_problem(row),
            "density": f"{row['density']:.4f}",
            "ours, ms": _both(row, "ms", ".2f"),
            "FlexAttention, ms": _both(flex[dense_problem(row)], "ms", ".2f"),
            "ours / (density x our dense time)": _both(row, "over_proportional", ".2f"),
        }
        for row in rows
        if row["name"] == "ours"
    )


def paper_table(result: Result) -> str:
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
    return {
        "head_dim": str(row["head_dim"]),
        "mask": "causal" if row["causal"] else "full",
        "tokens": f"{row['seq_len']:,}",
    }


def _both(row: Row, what: str, how: str) -> str:
    """A number of the forward and of the backward pass."""
    if row["status"] != "ok":
        return row["status"].split(":")[0]
    return " / ".join(format(row[f"{part}_{what}"], how) for part in PASSES)


# ---- drawn


def draw_peers(rows: list[Row], out: Path) -> None:
    """Draw TFLOP/s of dense attention as bars: a panel for each head dimension, mask and part."""
    import pandas as pd
    from matplotlib.figure import Figure

    dense = pd.DataFrame(rows).query("mask == 'dense'")
    lengths = dense.query("name != 'ours'")["seq_len"].unique().tolist()
    dense = dense.query(f"seq_len in {lengths}")
    names = dense["name"].unique()
    panels = list(dict.fromkeys(zip(dense["head_dim"], dense["causal"], strict=True)))
    figure = Figure(figsize=(3.4 * len(panels), 6), layout="constrained")
    grid = figure.subplots(2, len(panels), sharey="row", squeeze=False)
    for column, (head_dim, causal) in zip(grid.T, panels, strict=True):
        panel = dense.query(
            f"head_dim == {head_dim} and causal == {causal} and seq_len in @lengths"
        )
        for axes, part in zip(column, PASSES, strict=True):
            speeds = panel.pivot(index="seq_len", columns="name", values=f"{part}_tflops")
            speeds = speeds.reindex(columns=names)  # one colour each, also where one is missing
            speeds.plot.bar(ax=axes, rot=0, width=0.8, legend=False)
            axes.set_title(f"{part}, head_dim {head_dim}, {'causal' if causal else 'full'}", size=9)
            axes.set(xlabel="tokens", ylabel="TFLOP/s")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(names), fontsize=8)
    save(figure, out)


def draw_paper(rows: list[Row], out: Path) -> None:
    """Draw time and memory against length, as Figure 3 does, for the plain variant."""
    import pandas as pd
    from matplotlib.figure import Figure

    plain = pd.DataFrame(rows).query("variant == 'plain' and status == 'ok'")
    sparse = plain["mask"] != "dense"
    plain = plain.assign(label=plain["name"].where(~sparse, plain["name"] + ", block-sparse"))
    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = {"both_ms": "forward and backward, ms", "peak_mib": "peak memory, MiB"}
    for axes, (key, title) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        lines = plain.pivot(index="seq_len", columns="label", values=key)[plain["label"].unique()]
        lines.plot(ax=axes, style="o-", ms=3, loglog=True, legend=False)
        axes.set_xscale("log", base=2)
        axes.set(xlabel="tokens", ylabel=title)
    figure.axes[0].legend(fontsize=8)
    save(figure, out)


def draw_sparsity(rows: list[Row], out: Path) -> None:
    """Draw time against density, with the line of proportionality."""
    import pandas as pd
    from matplotlib.figure import Figure

    right = pd.DataFrame(rows).query("status == 'ok'")
    patterns = right["mask"].str.split().str[0]
    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, part in zip(figure.subplots(1, 2), PASSES, strict=True):
        for pattern, points in right.groupby(patterns):
            axes.plot(points["density"], points[f"{part}_ms"], "o", ms=4, label=pattern)
        for dense_ms in right.loc[patterns == "dense", f"{part}_ms"]:
            axes.plot([0, 1], [0, dense_ms], "k:", lw=1, label="density x dense time")
        axes.set(xlabel="density, share of the blocks", ylabel=f"{part}, ms")
        axes.set_ylim(bottom=0)
    figure.axes[0].legend(fontsize=8)
    save(figure, out)
