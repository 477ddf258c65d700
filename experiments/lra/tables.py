"""Tables and pictures of the report on Long Range Arena that report.py collects."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from evaluation.markdown import dict_table, digits, markdown_table
from evaluation.results import Row
from evaluation.style import PLAIN
from experiments.classifier_runs import display_description
from experiments.harness import Result
from experiments.lra.tasks import ATTENTIONS, BENCHMARK, TASKS
from experiments.reports import interval_text, mean_text
from experiments.style import OUR_SPARSE, OURS, PAPER

BASELINES = {
    "majority": "nothing (most frequent label)",
    "root": "outermost operator",
    "root_digits": "outermost operator and digits among its direct arguments",
    "years": "difference of the latest years in the texts",
    "cosine": "similarity of words (cosine, TF-IDF)",
    "citations": "number of inline citations in both texts",
    "comparisons": "the three comparisons above",
}


def markdown(result: Result) -> str:
    """Build the whole report in Markdown."""
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
        f"## Runs\n\nRuns that shared a GPU: {shared}.\n",
        runs_table(result),
        "## Settings\n",
        setup_table(result),
    ]
    if any(result["baselines"].values()):
        parts += ["## Baselines with partial information\n", baselines_table(result)]
    if speed:
        parts += [f"## Training step time on one {speed['device']}\n", speed_table(speed)]
    return "\n".join(parts)


def accuracy_table(result: Result) -> str:
    """Accuracy by task and model: the paper's rows, then ours.

    Averages are over the tasks on which all of our attentions were trained, not counting standard
    attention, which is the slowest. The table has no average of a single task, and no speedup
    column if neither side has speedups.
    """
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
        column = [speedups.get(model) for model in lines.index]
        lines["speedup"] = ["-" if speedup is None else f"{speedup:.1f}x" for speedup in column]
    titles = {model: _reference_title(model) for model in references} | ATTENTIONS
    lines = lines.rename(index=titles).reset_index(names="model")
    return markdown_table(list(lines), lines.to_numpy().tolist())


def _reference_title(model: str) -> str:
    """Title of a published model, which results store as on the left."""
    model = model.replace("(the paper's)", "(paper)")
    return model.replace("the same, pretrained", "Transformer, rotary, pretrained")


def runs_table(result: Result) -> str:
    """Accuracy of each seed, both intervals, and the cost of training."""
    return dict_table(
        {
            "task": TASKS[row["task"]].title,
            "attention": ATTENTIONS[row["attention"]],
            "seeds": ", ".join(map(str, row["seeds"])),
            "test accuracy per seed": ", ".join(f"{accuracy:.2f}" for accuracy in row["each"]),
            "mean": f"{row['test_accuracy']:.2f}",
            "interval over test examples": interval_text(row["test_interval"]),
            "interval over seeds": interval_text(row["seed_interval"]),
            "best validation (step)": ", ".join(
                f"{accuracy:.2f} ({step:,})"
                for accuracy, step in zip(row["best_val_accuracy"], row["best_step"], strict=True)
            ),
            "examples seen": f"{row['examples_in_all']:,}",
            "training minutes": f"{row['minutes']:.1f}"
            + (" (shared)" if any((n or 1) > 1 for n in row["jobs_per_gpu"]) else ""),
        }
        for row in result["rows"]
    )


def setup_table(result: Result) -> str:
    """Settings shared by the runs of a task, one row for each distinct set of settings."""
    lines = [
        {
            "task": TASKS[row["task"]].title,
            "tokens": f"{row['context_length']:,}" + (" x 2" if row["documents"] == 2 else ""),
            "positions": display_description(row["positions"]),
            "padding": display_description(row["padding"]),
            "training examples": display_description(row["changes"]),
            "parameters": f"{row['parameters']:,}",
            "batch size": f"{row['batch_size']}",
            "steps": f"{row['steps']:,}",
            "learning rate": f"{row['lr']:g}",
            "test examples": f"{row['test_examples']:,}",
            "configuration": row["config"],
        }
        for row in result["rows"]
    ]
    return dict_table({str(line): line for line in lines}.values())


def trials_table(*results: Result, task: str) -> str:
    """One task trained with several settings, one row each, in order of accuracy."""
    rows = [row for result in results for row in result["rows"] if row["task"] == task]
    return dict_table(
        {
            "positions": display_description(row["positions"]),
            "training examples": display_description(row["changes"]),
            "learning rate": f"{row['lr']:g}",
            "test accuracy": mean_text(row["test_accuracy"], row["interval"]),
        }
        for row in sorted(rows, key=lambda row: row["test_accuracy"])
    )


def baselines_table(result: Result) -> str:
    """Accuracy of baselines that see only a part of each example."""
    return dict_table(
        {
            "task": TASKS[task].title,
            "baseline sees": BASELINES.get(name) or name.replace("_", " "),
            "test accuracy": f"{accuracy:.1f}",
        }
        for task, scores in result["baselines"].items()
        for name, accuracy in (scores or {}).items()
    )


def speed_table(speed: Mapping[str, Any]) -> str:
    """Milliseconds per training step by task and attention, from experiments.lra.speed."""
    lines = []
    for (_, captured), group in groupby(speed["rows"], lambda r: (r["task"], r["captured"])):
        rows = {row["attention"]: row for row in group}
        first = rows["standard"]
        lines.append(
            {
                "task": _timed_title(first),
                "non-padding tokens": f"{first['tokens_share']:.0%} of {first['context_length']:,}",
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
    return dict_table(lines)


def approximate_speed_table(speed: Mapping[str, Any]) -> str:
    """Speedup of a step over standard attention by attention and task, as CUDA graphs."""
    mean = speed["geometric_means"]["captured"]
    lines: dict[str, dict[str, Any]] = {}
    for row in (row for row in speed["rows"] if row["captured"]):
        name = row["attention"]
        line = lines.setdefault(name, {"attention": ATTENTIONS.get(name, name)})
        line[_timed_title(row)] = f"{row['speedup']:.2f}x"
    for name, speedup in mean["speedup"].items():
        lines[name][f"geometric mean of {len(mean['tasks'])}"] = f"{speedup:.2f}x"
    return dict_table(lines.values(), "-")


def _timed_title(row: Row) -> str:
    """Title of a timed task, with the data if it is that of another task."""
    title, data = TASKS[row["task"]].title, row["data"]
    return title if data == TASKS[row["task"]].folder else f"{title} (on {data})"


COLOUR_OF = {"standard": PLAIN, "dense": OURS, "butterfly": OUR_SPARSE}


def draw(result: Result) -> Figure:
    """Draw test accuracy with its interval: a panel per trained task, a row per model."""
    rows = {(row["task"], row["attention"]): row for row in result["rows"]}
    tasks = [task for task in TASKS if task in {task for task, _ in rows}]
    trained = [name for name in ATTENTIONS if name in {attention for _, attention in rows}]
    others = result["references"]
    names = [_reference_title(other["model"]).replace(" (", "\n(") for other in others]
    names += [ATTENTIONS[name] for name in trained]
    figure = Figure(figsize=(8.5, 1 + 0.42 * len(names)), layout="constrained")
    panels = figure.subplots(1, len(tasks), sharey=True, squeeze=False)[0]
    for axes, task in zip(panels, tasks, strict=True):
        for y, other in enumerate(others):
            if task in other["accuracy"]:
                axes.plot(other["accuracy"][task], y, "D", ms=5, color=PAPER)
        for y, attention in enumerate(trained, start=len(others)):
            if row := rows.get((task, attention)):
                mean, (low, high) = row["test_accuracy"], row["interval"]
                look = {"color": COLOUR_OF[attention], "ms": 6, "lw": 2, "capsize": 3}
                axes.errorbar([mean], [y], xerr=[[mean - low], [high - mean]], fmt="o", **look)
        axes.set_title(TASKS[task].title.replace(" (", "\n("), size=9)
        axes.set_yticks(range(len(names)), names)
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.margins(x=0.15)
        axes.grid(alpha=0.3)
        axes.spines[["right", "top"]].set_visible(False)
    panels[0].set_ylim(len(names) - 0.5, -0.5)
    figure.supxlabel("test accuracy, %; Papilio with 95% intervals", size=10)
    return figure


def draw_speed(speed: Mapping[str, Any], references: Sequence[Row]) -> Figure:
    """Draw the speedup of a step over standard attention, from experiments.lra.speed.

    One row per task, and one for the geometric mean with that of the `references`.
    """
    titles = {"captured": "with CUDA graphs (as trained)", "plain": "without CUDA graphs"}
    modes = {mode: titles[mode] for mode in titles if mode in speed["geometric_means"]}
    ours = [name for name in ATTENTIONS if name != "standard"]
    theirs = [other["speedup"] for other in references if other["speedup"]]
    label = f"paper: {' and '.join(f'{speedup}x' for speedup in theirs)}"
    figure = Figure(figsize=(8.5, 4.2), layout="constrained")
    widths = (2, 1)[: len(modes)]
    panels = figure.subplots(1, len(modes), sharey=True, width_ratios=widths, squeeze=False)[0]
    for axes, (mode, title) in zip(panels, modes.items(), strict=True):
        rows = [row for row in speed["rows"] if row["captured"] == (mode == "captured")]
        tasks = {row["task"]: _timed_title(row) for row in rows}
        for number, name in enumerate(ours):
            speedups = [row["speedup"] for row in rows if row["attention"] == name]
            speedups.append(speed["geometric_means"][mode]["speedup"][name])
            heights = [y + 0.38 * number - 0.19 for y in range(len(speedups))]
            look = {"color": COLOUR_OF[name], "label": ATTENTIONS[name]}
            bars = axes.barh(heights, speedups, 0.34, **look)
            axes.bar_label(bars, fmt="%.1fx", padding=3, fontsize=9)
        for number, speedup in enumerate(theirs):
            ends = len(tasks) + 0.38 * number - 0.36, len(tasks) + 0.38 * number - 0.02
            axes.plot([speedup] * 2, ends, color=PAPER, lw=3, label=None if number else label)
        axes.set_yticks(range(len(tasks) + 1), [*tasks.values(), "geometric mean"])
        axes.axvline(1, color=PLAIN, lw=1)
        axes.margins(x=0.12)
        axes.set_title(title, size=10)
        axes.spines[["right", "top"]].set_visible(False)
    panels[0].invert_yaxis()
    figure.supxlabel("speedup over standard attention", size=10)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False)
    return figure
