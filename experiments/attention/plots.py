"""The plots of experiments.attention.

matplotlib takes a second to load, which --help should not wait for: each function loads it itself.
"""

from pathlib import Path
from typing import Any

from evaluation.results import Row


def draw_peers(rows: list[Row], out: Path) -> None:
    """Draw TFLOP/s of dense attention as bars: a panel for each head dimension, mask and part."""
    from matplotlib.figure import Figure

    rows = [row for row in rows if row["mask"] == "dense"]
    lengths = sorted({row["seq_len"] for row in rows if row["name"] != "ours"})
    rows = [row for row in rows if row["seq_len"] in lengths]
    names = list(dict.fromkeys(row["name"] for row in rows))
    panels = list(dict.fromkeys((row["head_dim"], row["causal"]) for row in rows))
    figure = Figure(figsize=(3.4 * len(panels), 6), layout="constrained")
    grid = figure.subplots(2, len(panels), sharey="row", squeeze=False)
    width = 0.8 / len(names)
    for column, (head_dim, causal) in enumerate(panels):
        for line, part in enumerate(("forward", "backward")):
            axes = grid[line, column]
            for number, name in enumerate(names):
                tflops = {
                    row["seq_len"]: row.get(f"{part}_tflops", 0.0)
                    for row in rows
                    if (row["name"], row["head_dim"], row["causal"]) == (name, head_dim, causal)
                }
                places = [group + (number + 0.5) * width - 0.4 for group in range(len(tflops))]
                axes.bar(places, list(tflops.values()), 0.92 * width, label=name)
            axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
            axes.set_title(f"{part}, head_dim {head_dim}, {'causal' if causal else 'full'}", size=9)
    for axes in grid[:, 0]:
        axes.set_ylabel("TFLOP/s")
    for axes in grid[1]:
        axes.set_xlabel("tokens")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(names), fontsize=8)
    save(figure, out)


def draw_paper(rows: list[Row], out: Path) -> None:
    """Draw time and memory against length, as Figure 3 does, for the plain variant."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    time, memory = figure.subplots(1, 2)
    rows = [row for row in rows if row["variant"] == "plain" and row["status"] == "ok"]
    for name, sparse in dict.fromkeys((row["name"], row["mask"] != "dense") for row in rows):
        line = [row for row in rows if (row["name"], row["mask"] != "dense") == (name, sparse)]
        lengths = [row["seq_len"] for row in line]
        label = f"{name}, block-sparse" if sparse else name
        time.plot(lengths, [row["both_ms"] for row in line], "o-", ms=3, label=label)
        memory.plot(lengths, [row["peak_mib"] for row in line], "o-", ms=3, label=label)
    time.set_ylabel("forward and backward, ms")
    memory.set_ylabel("peak memory, MiB")
    for axes in (time, memory):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("tokens")
    time.legend(fontsize=8)
    save(figure, out)


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


def save(figure: Any, out: Path) -> None:
    """Write a figure."""
    figure.savefig(out, dpi=120)
    print(f"drew {out}")
