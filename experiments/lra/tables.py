"""The tables of a report on Long Range Arena, from what experiments/lra/report.py collected."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from evaluation.markdown import digits, markdown_table
from experiments.lra.jobs import ATTENTIONS, BENCHMARK, TASKS

Result = dict[str, Any]

YARDSTICKS = {
    "majority": "the commonest label",
    "root": "the outermost operator alone",
    "root_digits": "it, and the digits among its direct arguments",
}


def markdown(result: Result) -> str:
    """The whole report."""
    rows = result["rows"]
    missing = [TASKS[task].title for task in BENCHMARK if not _of(rows, task=task)]
    parts = [
        "# Long Range Arena, Table 3 of the FlashAttention paper\n",
        f"Test accuracy in percent, the mean over seeds, recipe {result['recipe']!r}. In brackets "
        "the 95% interval over test examples and, where there are several, seeds.\n",
        accuracy_table(result),
    ]
    if missing:
        parts.append(f"Not trained here: {', '.join(missing)}.\n")
    parts += [
        "## Each run\n",
        "Intervals are at 95%: over test examples that of Wilson for the mean, at the size of the "
        "test split; over seeds that of Student's t; above, their half-widths are added as "
        f"independent errors. {_sharing(rows)}\n",
        runs_table(result),
        "## What is trained\n",
        setup_table(result),
    ]
    if any(result["yardsticks"].values()):
        parts += ["## What partial knowledge scores\n", yardsticks_table(result)]
    if result["speed"]:
        parts += [
            "## Time of a training step\n",
            f"On one {result['speed']['device']}, against standard attention in the same process. "
            "Ours skips keys that are padding. As CUDA graphs, as runs are trained, and with "
            "kernels launched one by one. Peak memory is that of all tensors but the data."
            f"{_stand_ins(result['speed'])}\n",
            speed_table(result),
        ]
    return "\n".join(parts)


def accuracy_table(result: Result) -> str:
    """The paper's table with its rows first and ours below.

    Averages are over the tasks on which all of our attentions were trained, standard attention,
    the slowest, aside; there is none of a single task. Nor are there speed-ups of recipes of which
    neither side has any.
    """
    rows = result["rows"]
    ours = [attention for attention in ATTENTIONS if _of(rows, attention=attention)]
    columns = [task for task in TASKS if task in BENCHMARK or _of(rows, task=task)]
    compared = [attention for attention in ours if attention != "standard"] or ours
    common = [t for t in BENCHMARK if all(_of(rows, task=t, attention=a) for a in compared)]
    average = []
    if len(common) > 1:
        whole = len(common) == len(BENCHMARK)
        average = ["average" if whole else f"average of {_titles(common)}"]
    timed = result["speed"] or any(other["speedup"] for other in result["references"])
    speedups = ["speed-up"] if timed else []
    table = []
    for other in result["references"]:
        mean = other["average"] if len(common) == len(BENCHMARK) else _mean(other, common)
        table.append(
            [
                other["model"],
                *(digits(other["accuracy"].get(task), ".1f") for task in columns),
                *(digits(mean, ".1f") for _ in average),
                *(_times(other["speedup"]) for _ in speedups),
            ]
        )
    for attention in ours:
        by_task = {row["task"]: row for row in _of(rows, attention=attention)}
        accuracy = {task: row["test_accuracy"] for task, row in by_task.items()}
        table.append(
            [
                ATTENTIONS[attention],
                *(_with_interval(by_task.get(task)) for task in columns),
                *(digits(_mean({"accuracy": accuracy}, common), ".1f") for _ in average),
                *(_times(_geometric_mean(result, attention)) for _ in speedups),
            ]
        )
    header = ["model", *(TASKS[task].title for task in columns), *average, *speedups]
    return markdown_table(header, table)


def runs_table(result: Result) -> str:
    """Each seed's accuracy, both intervals, and what training took."""
    header = ["task", "attention", "seeds", "test accuracy, each", "mean", "over test examples"]
    header += ["over seeds", "best validation (step)", "examples seen", "minutes of training"]
    return markdown_table(
        header,
        [
            [
                TASKS[row["task"]].title,
                ATTENTIONS[row["attention"]],
                ", ".join(map(str, row["seeds"])),
                ", ".join(f"{accuracy:.2f}" for accuracy in row["each"]),
                f"{row['test_accuracy']:.2f}",
                _interval(row["test_interval"]),
                _interval(row["seed_interval"]),
                ", ".join(
                    f"{accuracy:.2f} ({step:,})"
                    for accuracy, step in zip(
                        row["best_val_accuracy"], row["best_step"], strict=True
                    )
                ),
                f"{row['examples_in_all']:,}",
                f"{row['minutes']:.1f}{' (shared)' if _most_on_a_gpu([row]) > 1 else ''}",
            ]
            for row in result["rows"]
        ],
    )


def setup_table(result: Result) -> str:
    """What the runs of a task have in common: one line, or one for each way that it was trained."""
    lines = [
        (
            TASKS[row["task"]].title,
            f"{row['context_length']:,}" + (" x 2" if row["documents"] == 2 else ""),
            row["positions"],
            row["padding"],
            row["changes"],
            f"{row['parameters']:,}",
            f"{row['batch_size']}",
            f"{row['steps']:,}",
            f"{row['lr']:g}",
            f"{row['test_examples']:,}",
            row["config"],
        )
        for row in result["rows"]
    ]
    header = ["task", "tokens", "positions", "padding", "training examples", "parameters"]
    header += ["batch", "steps", "learning rate", "test examples", "configuration"]
    return markdown_table(header, list(dict.fromkeys(lines)))


def trials_table(results: Sequence[Result], task: str) -> str:
    """One task trained in several ways, one line for each, in the order of their accuracies."""
    rows = [row for result in results for row in _of(result["rows"], task=task)]
    return markdown_table(
        ["positions", "training examples", "learning rate", "test accuracy"],
        [
            [row["positions"], row["changes"], f"{row['lr']:g}", _with_interval(row)]
            for row in sorted(rows, key=lambda row: row["test_accuracy"])
        ],
    )


def yardsticks_table(result: Result) -> str:
    """Accuracy of guesses that see a part of each example."""
    scores: dict[str, dict[str, float] | None] = result["yardsticks"]
    return markdown_table(
        ["task", "the best guess from", "test accuracy"],
        [
            [TASKS[task].title, YARDSTICKS.get(name, name.replace("_", " ")), f"{accuracy:.1f}"]
            for task, of_task in scores.items()
            for name, accuracy in (of_task or {}).items()
        ],
    )


def speed_table(result: Result) -> str:
    """Milliseconds of a training step of each task by attention, and the speed-up."""
    header = ["task", "tokens that are not padding", "CUDA graph", *ATTENTIONS.values()]
    header += ["peak memory, GiB"]
    lines = []
    groups: dict[tuple[str, bool], list[dict[str, Any]]] = {}
    for row in result["speed"]["rows"]:
        groups.setdefault((row["task"], row["captured"]), []).append(row)
    for (task, captured), rows in groups.items():
        by_attention = {row["attention"]: row for row in rows}
        some = [by_attention[attention] for attention in ATTENTIONS]
        lines.append(
            [
                TASKS[task].title + _data_of(rows[0]),
                f"{rows[0]['tokens_share']:.0%} of {rows[0]['context_length']:,}",
                _yes(captured),
                *(f"{row['step_ms']:.2f} ms ({row['speedup']:.2f}x)" for row in some),
                " / ".join(f"{row['peak_gib']:.2f}" for row in some),
            ]
        )
    for mode, mean in result["speed"]["geometric_means"].items():
        speedups = [f"{mean['speedup'][attention]:.2f}x" for attention in ATTENTIONS]
        what = f"geometric mean of {len(mean['tasks'])}"
        lines.append([what, "", _yes(mode == "captured"), *speedups, ""])
    return markdown_table(header, lines)


def _of(rows: Sequence[dict[str, Any]], **wanted: str) -> list[dict[str, Any]]:
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def _mean(model: dict[str, Any], tasks: Sequence[str]) -> float | None:
    """Over tasks; None where one was not trained."""
    if not tasks or any(task not in model["accuracy"] for task in tasks):
        return None
    return fmean(model["accuracy"][task] for task in tasks)


def _titles(tasks: Sequence[str]) -> str:
    return ", ".join(TASKS[task].title for task in tasks)


def _with_interval(row: dict[str, Any] | None) -> str:
    return "-" if row is None else f"{row['test_accuracy']:.1f} ({_interval(row['interval'])})"


def _interval(interval: Sequence[float] | None) -> str:
    return "-" if interval is None else f"{interval[0]:.1f} to {interval[1]:.1f}"


def _times(speedup: float | None) -> str:
    return "-" if speedup is None else f"{speedup:.1f}x"


def _geometric_mean(result: Result, attention: str) -> float | None:
    """Over standard attention, whose own is none."""
    if attention == "standard" or not result["speed"]:
        return None
    means = result["speed"]["geometric_means"]
    return means["captured"]["speedup"][attention] if "captured" in means else None


def _data_of(row: dict[str, Any]) -> str:
    data = TASKS[row["task"]].folder
    return "" if row["data"] == data else f" (on {row['data']})"


def _stand_ins(speed: dict[str, Any]) -> str:
    others = {row["task"]: row["data"] for row in speed["rows"] if _data_of(row)}
    return "".join(
        f" {TASKS[task].title} was timed on the data of {other}: the same shapes, other padding."
        for task, other in others.items()
    )


def _most_on_a_gpu(rows: Sequence[dict[str, Any]]) -> int:
    """Runs that shared a GPU, at most; 0 if nothing was noted."""
    return max((n for row in rows for n in row["jobs_per_gpu"] if n is not None), default=0)


def _sharing(rows: Sequence[dict[str, Any]]) -> str:
    most = _most_on_a_gpu(rows)
    if any(n is None for row in rows for n in row["jobs_per_gpu"]) or not most:
        return "Minutes are wall-clock time; it was not noted how many runs shared a GPU."
    if most == 1:
        return "Each run had a GPU of its own."
    return f"Minutes are wall-clock time; (shared): up to {most} runs shared a GPU."


def _yes(captured: bool) -> str:
    return "yes" if captured else "no"
