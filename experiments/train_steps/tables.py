"""Tables and pictures of training steps in README.md and docs."""

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from evaluation.markdown import dict_table
from evaluation.results import Row
from experiments.reports import display_name
from experiments.style import OURS, PEERS

PARTS: dict[str, str] = {
    "matrix products": "matmuls",
    "nothing running": "GPU idle",
    "casts, bias gradients, embedding and the rest": "casts, bias gradients, embedding, other",
}
"""Names of parts in the table, by their names in results."""
BASES = ("nanoGPT, flash", "nanoGPT, cuDNN", "Hugging Face, eager")


def speed_table(result: Row) -> str:
    """Speed and memory of a training step, from `experiments.train_steps.speed`."""
    rows = result["rows"]
    speeds = {(_shape(row), row["name"]): row["tokens_per_s"] for row in rows}

    def line(row: Row) -> dict[str, str]:
        mfu = row["mfu"]
        shares = f"{mfu['causal']:.1%} / {mfu['full']:.1%}" if mfu else "unknown GPU"

        def times(name: str) -> str:
            base = speeds.get((_shape(row), name))
            return f"{row['tokens_per_s'] / base:.2f}" if base else "-"

        return {
            "model": row["size"],
            "context": f"{row['context_length']:,}",
            "implementation": display_name(row["name"]),
            "tokens/s": f"{row['tokens_per_s']:,.0f}",
            **{f"x {name}": times(name) for name in BASES},
            "MFU, causal / full": shares,
            "peak memory": f"{row['peak_gib']:.1f} GiB",
        }

    return dict_table(map(line, rows))


def parts_table(result: Row) -> str:
    """Time and kernel launches by part of a step, for Papilio and nanoGPT on the first model.

    Papilio without biases if measured, because nanoGPT has none.
    """
    measured = {row["name"] for row in result["rows"]}
    ours = "ours, no biases" if "ours, no biases" in measured else "ours"
    names = (ours, "nanoGPT, cuDNN")
    columns = {
        f"{display_name(row['name'])}, {row['context_length']:,}": row
        for row in result["rows"]
        if row["name"] in names and row["size"] == result["rows"][0]["size"]
    }
    lines: dict[str, dict[str, str]] = {"whole step": {}}
    for name, row in columns.items():
        lines["whole step"][name] = f"{1000 * row['step_s']:.1f}"
        for part, cost in row["parts"].items():
            launches = f", {cost['launches']:.0f}" if cost["launches"] else ""
            line = lines.setdefault(PARTS.get(part) or part, {})
            line[name] = f"{cost['ms']:.1f}{launches}"
    return dict_table(
        ({"part (ms, kernel launches)": part} | line for part, line in lines.items()), missing="-"
    )


def _shape(row: Row) -> tuple[str, int]:
    return row["size"], row["context_length"]


def butterfly_table(result: Row) -> str:
    """Dense attention and a butterfly, from `experiments.train_steps.speed --butterfly`."""
    rows = result["rows"]
    dense = {r["context_length"]: r["tokens_per_s"] for r in rows if r["name"] == "ours"}
    shortest = dense[min(dense)]
    return dict_table(
        {
            "context": f"{row['context_length']:,}",
            "attention": {"ours": "dense"}.get(row["name"], "butterfly"),
            "tokens/s": f"{row['tokens_per_s']:,.0f}",
            "x dense": f"{row['tokens_per_s'] / dense[row['context_length']]:.2f}",
            f"x dense at {min(dense):,}": f"{row['tokens_per_s'] / shortest:.2f}",
            "peak memory": f"{row['peak_gib']:.1f} GiB",
        }
        for row in rows
    )


def losses_table(**results: Row) -> str:
    """Runs on Papilio's attention and on PyTorch's, from `experiments.same_losses`, by context."""
    return dict_table(
        {
            "context": context,
            "attention, run": _display_run(run),
            "validation loss": f"{values['validation_loss']:.4f}",
            "tokens/s": f"{values['tokens_per_s']:,.0f}",
            "MFU, causal / full": f"{values['mfu_causal']:.1%} / {values['mfu_full']:.1%}",
            "peak memory": f"{values['memory_gib']:.1f} GiB",
        }
        for context, result in results.items()
        for run, values in result["runs"].items()
    )


def _display_run(run: str) -> str:
    """Name of a run in the table; older results call the portable kernels "triton"."""
    run = run.replace("triton", "ours, portable").replace("sdpa", "PyTorch SDPA")
    return display_name(run)


def gaps_table(**results: Row) -> str:
    """Distances between runs on the same attention, and between runs on different ones."""

    def gap(result: Row, kind: str, name: str) -> str:
        means = result["distances"][kind]
        return f"{means[name]:.4f} ({means['pairs']} pair{'s' * (means['pairs'] != 1)})"

    return dict_table(
        {
            "context": context,
            "gap, nats": title,
            "both runs on the same attention": gap(result, "same", name),
            "one on Papilio's, one on PyTorch's": gap(result, "different", name),
        }
        for context, result in results.items()
        for name, title in (("curve", "training, mean"), ("validation", "validation, final"))
    )


def losses(run: Row) -> np.ndarray:
    """Training losses of a run, from `experiments.same_losses`."""
    return np.array(run["curve"])[:, 1]


def draw_speed(result: Row) -> Figure:
    """Draw tokens/s and the speedup over nanoGPT, a panel per model and context."""
    panels: dict[str, list[Row]] = {}
    for row in result["rows"]:
        panels.setdefault(f"{row['size']}, context {row['context_length']:,}", []).append(row)
    return speed_bars(panels, "nanoGPT, cuDNN", "nanoGPT on cuDNN attention")


def speed_bars(panels: Mapping[str, list[Row]], base: str, base_title: str) -> Figure:
    """Draw tokens/s of rows, and their speedup over the one that is called `base`."""
    names = list(dict.fromkeys(row["name"] for rows in panels.values() for row in rows))
    width = 1.2 + 0.08 * max(map(len, names)) + 2.1 * len(panels)
    figure = Figure(figsize=(width, 0.9 + 0.4 * len(names)), layout="constrained")
    grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (title, rows) in zip(grid, panels.items(), strict=True):
        speeds = {row["name"]: row["tokens_per_s"] for row in rows}
        of_base = speeds.get(base)
        for name, speed in speeds.items():
            color = PEERS.get(name, OURS)
            bars = axes.barh(names.index(name), speed / 1e3, 0.75, color=color)
            text = f"{speed / 1e3:.0f}" + (f", {speed / of_base:.2f}x" if of_base else "")
            axes.bar_label(bars, [text], padding=3, fontsize=9)
        axes.set_title(title, size=10)
        axes.margins(x=0.5)
        axes.xaxis.set_major_locator(MaxNLocator(3))
        axes.spines[["right", "top"]].set_visible(False)
    grid[0].set_yticks(range(len(names)), map(display_name, names))
    grid[0].invert_yaxis()
    figure.supxlabel(f"thousand tokens/s, and speedup over {base_title}", size=10)
    return figure


def draw_losses(result: Row, name: str) -> Figure:
    """Draw the loss curves of all runs, and below them the distance from the mean SDPA curve."""
    figure = Figure(figsize=(8.5, 5), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[1, 2])
    ours = {"color": OURS, "lw": 2.5, "label": "Papilio"}
    looks = {
        "ours": ours,
        "triton": ours,  # portable kernels, in older results
        "sdpa": {"color": PEERS["SDPA flash"], "lw": 1.5, "label": "PyTorch SDPA"},
    }
    runs = result["runs"]
    base = np.mean([losses(run) for n, run in runs.items() if n.startswith("sdpa")], axis=0)
    for run, values in runs.items():
        impl, number = run.split()
        look = looks[impl] if number == "1" else looks[impl] | {"label": None}
        tokens = np.array(values["curve"])[:, 0] / 1e6
        top.plot(tokens, losses(values), **look)
        bottom.plot(tokens, losses(values) - base, **look)
    top.set(title=f"{name}, all runs from one seed", ylabel="loss, nats")
    bottom.set(xlabel="training tokens, millions", ylabel="loss minus mean SDPA loss, nats")
    bottom.axhline(0, color="black", lw=0.8, zorder=1)
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
    bottom.legend(frameon=False)
    return figure
