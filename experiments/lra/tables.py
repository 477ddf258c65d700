"""The tables and the picture of a report on Long Range Arena, of what report.py collected."""

import math
from collections.abc import Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from evaluation.markdown import digits, markdown_table
from evaluation.results import Row
from evaluation.style import styles_of
from experiments.lra.tasks import ATTENTIONS, BENCHMARK, TASKS
from experiments.reports import interval_text, mean_text, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Result = dict[str, Any]

YARDSTICKS = {
    "majority": "the commonest label",
    "root": "the outermost operator alone",
    "root_digits": "it, and the digits among its direct arguments",
}


def markdown(result: Result) -> str:
    """The whole report."""
    rows, speed = result["rows"], result["speed"]
    trained = {row["task"] for row in rows}
    missing = [TASKS[task].title for task in BENCHMARK if task not in trained]
    noted = [n for row in rows for n in row["jobs_per_gpu"]]
    shared = "not noted" if None in noted else f"up to {max(noted)}"
    parts = [
        "# Long Range Arena, Table 3 of the FlashAttention paper\n",
        f"Recipe {result['recipe']!r}; what the columns mean: docs/lra.md.\n",
        accuracy_table(result),
        *([f"Not trained here: {', '.join(missing)}.\n"] if missing else []),
        f"## Each run\n\nRuns on one GPU at a time: {shared}.\n",
        runs_table(result),
        "## What is trained\n",
        setup_table(result),
    ]
    if any(result["yardsticks"].values()):
        parts += ["## What partial knowledge scores\n", yardsticks_table(result)]
    if speed:
        parts += [f"## Time of a training step on one {speed['device']}\n", speed_table(speed)]
    return "\n".join(parts)


def accuracy_table(result: Result) -> str:
    """The paper's table with its rows first and ours below.

    Averages are over the tasks on which all of our attentions were trained, standard attention,
    the slowest, aside; there is none of a single task. Nor are there speed-ups of recipes of which
    neither side has any.
    """
    import pandas as pd

    rows = pd.DataFrame(result["rows"])
    rows["cell"] = [mean_text(row["test_accuracy"], row["interval"]) for row in result["rows"]]
    trained = [attention for attention in ATTENTIONS if attention in {*rows["attention"]}]
    ours, cells = (
        rows.pivot(index="attention", columns="task", values=name).loc[trained]
        for name in ("test_accuracy", "cell")
    )
    references = {other["model"]: other for other in result["references"]}
    theirs = pd.DataFrame({name: other["accuracy"] for name, other in references.items()}).T
    columns = [task for task in TASKS if task in BENCHMARK or task in ours]
    lines = pd.concat([theirs.map("{:.1f}".format), cells]).reindex(columns=columns).fillna("-")
    compared = ours.drop("standard") if len(ours) > 1 and "standard" in trained else ours
    common = [task for task in BENCHMARK if task in ours and compared[task].notna().all()]
    lines.columns = [TASKS[task].title for task in columns]
    if len(common) > 1:
        averages = pd.concat([theirs, ours])[common].mean(axis=1, skipna=False)
        name = f"average of {', '.join(TASKS[task].title for task in common)}"
        if len(common) == len(BENCHMARK):
            name = "average"
            averages.update(pd.Series({m: other["average"] for m, other in references.items()}))
        lines[name] = [digits(average, ".1f") for average in averages]
    speedups = {model: other["speedup"] for model, other in references.items()}
    if result["speed"] or any(speedups.values()):
        means = result["speed"]["geometric_means"] if result["speed"] else {}
        speedups |= means.get("captured", {}).get("speedup", {}) | {"standard": None}
        found = [speedups.get(model) for model in lines.index]
        lines["speed-up"] = ["-" if speedup is None else f"{speedup:.1f}x" for speedup in found]
    lines = lines.rename(index=ATTENTIONS).reset_index(names="model")
    return markdown_table(list(lines), lines.to_numpy().tolist())


def runs_table(result: Result) -> str:
    """Each seed's accuracy, both intervals, and what training took."""
    return table(
        {
            "task": TASKS[row["task"]].title,
            "attention": ATTENTIONS[row["attention"]],
            "seeds": ", ".join(map(str, row["seeds"])),
            "test accuracy, each": ", ".join(f"{accuracy:.2f}" for accuracy in row["each"]),
            "mean": f"{row['test_accuracy']:.2f}",
            "over test examples": interval_text(row["test_interval"]),
            "over seeds": interval_text(row["seed_interval"]),
            "best validation (step)": ", ".join(
                f"{accuracy:.2f} ({step:,})"
                for accuracy, step in zip(row["best_val_accuracy"], row["best_step"], strict=True)
            ),
            "examples seen": f"{row['examples_in_all']:,}",
            "minutes of training": f"{row['minutes']:.1f}"
            + (" (shared)" if any((n or 1) > 1 for n in row["jobs_per_gpu"]) else ""),
        }
        for row in result["rows"]
    )


def setup_table(result: Result) -> str:
    """What the runs of a task have in common: one line, or one for each way that it was trained."""
    lines = [
        {
            "task": TASKS[row["task"]].title,
            "tokens": f"{row['context_length']:,}" + (" x 2" if row["documents"] == 2 else ""),
            "positions": row["positions"],
            "padding": row["padding"],
            "training examples": row["changes"],
            "parameters": f"{row['parameters']:,}",
            "batch": f"{row['batch_size']}",
            "steps": f"{row['steps']:,}",
            "learning rate": f"{row['lr']:g}",
            "test examples": f"{row['test_examples']:,}",
            "configuration": row["config"],
        }
        for row in result["rows"]
    ]
    return table({str(line): line for line in lines}.values())


def trials_table(*results: Result, task: str) -> str:
    """One task trained in several ways, one line for each, in the order of their accuracies."""
    rows = [row for result in results for row in result["rows"] if row["task"] == task]
    return table(
        {
            "positions": row["positions"],
            "training examples": row["changes"],
            "learning rate": f"{row['lr']:g}",
            "test accuracy": mean_text(row["test_accuracy"], row["interval"]),
        }
        for row in sorted(rows, key=lambda row: row["test_accuracy"])
    )


def yardsticks_table(result: Result) -> str:
    """Accuracy of guesses that see a part of each example."""
    return table(
        {
            "task": TASKS[task].title,
            "the best guess from": YARDSTICKS.get(name) or name.replace("_", " "),
            "test accuracy": f"{accuracy:.1f}",
        }
        for task, scores in result["yardsticks"].items()
        for name, accuracy in (scores or {}).items()
    )


def speed_table(speed: Mapping[str, Any]) -> str:
    """Milliseconds of a training step by task and attention, of experiments.lra.speed."""
    lines = []
    for (task, captured), group in groupby(speed["rows"], lambda r: (r["task"], r["captured"])):
        rows = {row["attention"]: row for row in group}
        first, data = rows["standard"], rows["standard"]["data"]
        lines.append(
            {
                "task": TASKS[task].title + ("" if data == TASKS[task].folder else f" (on {data})"),
                "tokens that are not padding": f"{first['tokens_share']:.0%} of "
                f"{first['context_length']:,}",
                "CUDA graph": "yes" if captured else "no",
                **{
                    title: f"{rows[name]['step_ms']:.2f} ms ({rows[name]['speedup']:.2f}x)"
                    for name, title in ATTENTIONS.items()
                },
                "peak memory, GiB": " / ".join(f"{rows[a]['peak_gib']:.2f}" for a in ATTENTIONS),
            }
        )
    for mode, mean in speed["geometric_means"].items():
        lines.append(
            {
                "task": f"geometric mean of {len(mean['tasks'])}",
                "CUDA graph": "yes" if mode == "captured" else "no",
                **{title: f"{mean['speedup'][name]:.2f}x" for name, title in ATTENTIONS.items()},
            }
        )
    return table(lines)


def draw(result: Result) -> "Figure":
    """Validation accuracy over examples seen: a panel a task, a line an attention, seeds thin."""
    # matplotlib takes a second to load, which --help should not wait for
    from matplotlib.figure import Figure

    curves: dict[str, dict[str, list[Row]]] = {}
    for run in result["runs"]:
        curves.setdefault(run["task"], {}).setdefault(run["attention"], []).append(run["curve"])
    tasks = [task for task in TASKS if task in curves]
    n_columns = math.ceil(math.sqrt(len(tasks)))
    n_rows = math.ceil(len(tasks) / n_columns)
    figure = Figure(figsize=(1 + 4 * n_columns, 0.7 + 3 * n_rows), layout="constrained")
    panels = figure.subplots(n_rows, n_columns, squeeze=False).flatten()
    styles = styles_of(ATTENTIONS)
    lines = {}
    for task, axes in zip(tasks, panels, strict=False):
        for attention in (a for a in ATTENTIONS if a in curves[task]):
            look: dict[str, Any] = {**styles[attention], "marker": ""}
            seeds = [curve["val_accuracy"] for curve in curves[task][attention]]
            millions = np.array(curves[task][attention][0]["examples"]) / 1e6
            if len(seeds) > 1:
                axes.plot(millions, np.transpose(seeds), **look, lw=0.6, alpha=0.5)
            (line,) = axes.plot(millions, np.mean(seeds, axis=0), **look, lw=1.6)
            lines[ATTENTIONS[attention]] = line
        other = result["references"][0]
        if task in other["accuracy"]:
            line = axes.axhline(other["accuracy"][task], color="#888888", ls=":", lw=1)
            lines[f"{other['model']}, on test"] = line
        axes.set_title(TASKS[task].title, loc="left", fontsize=10)
        axes.grid(alpha=0.3)
    for axes in panels[len(tasks) :]:
        axes.set_axis_off()
    figure.supxlabel("training examples seen, millions", fontsize=10)
    figure.supylabel("validation accuracy, %", fontsize=10)
    figure.legend(lines.values(), lines, loc="outside upper center", ncols=4, fontsize=9)
    return figure
