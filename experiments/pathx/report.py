"""The paper's Table 6 beside ours: accuracy on Path-X and Path-256, in JSON, Markdown, a picture.

python -m experiments.pathx.report docs/results/pathx.json    # Markdown and picture anew
"""

from experiments.reports import report_command

command = report_command(__name__)  # before PyTorch is loaded, which takes seconds

import re
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from data.lra.store import open_split
from evaluation.markdown import digits
from evaluation.results import Row, read_result, write_result
from evaluation.statistics import wilson
from experiments import style
from experiments.classifier_runs import describe, finished_folders, read_run_config
from experiments.harness import Result
from experiments.pathx.stages import DENSE, SPARSE, STAGES
from experiments.reports import mean_text, publish, table
from experiments.results import add_runs
from training.metrics import read_metrics

PAPER = [
    {"model": DENSE, "pathx": 61.4, "path256": None},
    {"model": SPARSE, "pathx": 56.0, "path256": 63.1},
]
"""arXiv 2205.14135, Table 6: test accuracy in percent; None: at chance or out of memory, as were
all other models there."""

CHANCE = 50  # percent
LABELS = 66  # percent, on the bars, where no other line is
YARDSTICK_SIZES = {"64": "Path-64", "128": "Path-X", "256": "Path-256"}
_NAME = re.compile(rf"({'|'.join(STAGES)})_seed\d+")


def write_report(out: Path, results: Path, others: Sequence[Path] = ()) -> None:
    """Report on all finished stages in `out`, as pathx.json in `results`; prints the tables.

    Runs of the reports `others` are told of, too, where `out` has none of their name.

    Raises:
        ValueError: nothing is finished.
    """
    found = [describe_run(f) for f in finished_folders(out) if _NAME.fullmatch(f.name)]
    runs = add_runs(found, others, lambda run: (list(STAGES).index(run["stage"]), run["seed"]))
    if not runs:
        raise ValueError(f"{out} holds no finished stage to report on")
    path = results / "pathx.json"
    write_result(path, {"unit": "percent", "paper": PAPER, "runs": runs})
    redraw(path)


def redraw(path: Path) -> None:
    """Write the Markdown and the picture anew beside the JSON, and print the tables.

    What can be had without following a contour is told, too, where experiments.contours.yardsticks
    left it beside the JSON.
    """
    result = read_result(path, "paper", "runs")
    parts = [
        "# Path-X and Path-256, Table 6 of the FlashAttention paper\n",
        "Test accuracy in percent; what the columns mean: docs/lra.md.\n",
        accuracy_table(result),
        "## What each run took\n",
        runs_table(result),
    ]
    yardsticks, beside = None, path.parent / "pathfinder_yardsticks.json"
    if beside.exists():
        yardsticks = read_result(beside, "accuracies")
        parts.append("## What can be had without following a contour\n")
        parts.append(yardsticks_table(yardsticks))
    publish(path, "\n".join(parts), draw(result, yardsticks))


def describe_run(folder: Path) -> Row:
    """Settings, cost and accuracy of a finished stage."""
    run, config, last = describe(folder), read_run_config(folder), read_metrics(folder)[-1]
    stage = folder.name.rpartition("_seed")[0]
    before = STAGES[stage].before
    low, high = wilson(last["test_accuracy"], run["test_examples"])
    return {
        "stage": stage,
        **run,
        "size": config.model.grid_width,
        "tokens": config.model.context_length,
        "attention": config.model.mask.pattern,
        "augment": config.data.augment,
        "examples_in_sets": sum(len(open_split(p, "train")) for p in config.data.training_paths),
        "wall_minutes": last["wall_s"] / 60 if "wall_s" in last else None,
        "test_interval": [100 * low, 100 * high],
        "begins_with": before and f"{before}_seed{run['seed']}",
    }


def accuracy_table(result: Result) -> str:
    """The paper's rows and ours."""
    paper: dict[str, Row] = {row["model"]: row for row in result["paper"]}
    other = {name: paper[of[0]][of[1]] for name, stage in STAGES.items() if (of := stage.beside)}
    return table(
        {
            "model": STAGES[run["stage"]].title,
            "seed": str(run["seed"]),
            "tokens": f"{run['tokens']:,}",
            "black pixels": "left out" if "left out" in run["padding"] else "tokens",
            "test accuracy": mean_text(run["test_accuracy"], run["test_interval"]),
            "the paper's": digits(other.get(run["stage"]), ".1f"),
        }
        for run in result["runs"]
    )


def runs_table(result: Result) -> str:
    """Steps, images and minutes of each stage."""
    return table(
        {
            "stage": STAGES[run["stage"]].title,
            "seed": str(run["seed"]),
            "attention": run["attention"],
            "positions": run["positions"],
            "parameters": f"{run['parameters']:,}",
            "steps": f"{run['steps']:,}",
            "images seen": f"{run['examples']:,}",
            "of": f"{run['examples_in_sets']:,}",
            "GPU-minutes of training": f"{run['minutes']:.1f}",
            "minutes in all": digits(run["wall_minutes"], ".1f"),
            "last on": _last_devices(run["starts"]),
        }
        for run in result["runs"]
    )


def yardsticks_table(result: Result) -> str:
    """Accuracy in percent of guesses from the markers, of experiments.contours.yardsticks."""
    of_sizes = result["accuracies"]
    found = {title: of_sizes[n] for n, title in YARDSTICK_SIZES.items() if n in of_sizes}
    return table(
        {
            "the best guess from": name,
            **{title: f"{100 * of[name]:.1f}" for title, of in found.items() if name in of},
        }
        for name in dict.fromkeys(name for of in found.values() for name in of)
    )


def best_guess(yardsticks: Result, size: int) -> float:
    """Accuracy in percent of the best guess from the markers of images `size` pixels wide."""
    return 100 * max(yardsticks["accuracies"][str(size)].values())


def _last_devices(starts: list[Row]) -> str:
    """The GPUs of the newest start; how many was not noted in the first runs."""
    if not starts:
        return "-"
    n, device = starts[-1].get("world_size", 1), starts[-1]["device"]
    return device if n == 1 else f"{n} x {device}"


def draw(result: Result, yardsticks: Result | None = None) -> Figure:
    """Test accuracy of each stage that the paper has, too: a bar a seed, from chance on.

    Dotted is the best guess from the markers alone, if the `yardsticks` have one of that size.
    """
    stages: dict[str, list[Row]] = {}
    for run in result["runs"]:
        if STAGES[run["stage"]].beside:
            stages.setdefault(run["stage"], []).append(run)
    paper: dict[str, Row] = {row["model"]: row for row in result["paper"]}
    figure = Figure(figsize=(8.5, 1 + 0.85 * len(stages)), layout="constrained")
    axes = figure.subplots()
    for line, (name, runs) in enumerate(stages.items()):
        for number, run in enumerate(runs):
            y, accuracy = line + 0.26 * (number - (len(runs) - 1) / 2), run["test_accuracy"]
            low, high = run["test_interval"]
            colour = style.OURS if run["attention"] == "dense" else style.OUR_SPARSE
            axes.barh(y, accuracy - CHANCE, 0.24, left=CHANCE, color=colour)
            ends = {"xerr": [[accuracy - low], [high - accuracy]], "capsize": 2}
            axes.errorbar([accuracy], [y], color="black", lw=1, **ends)
            text = f"{accuracy:.1f}, seed {run['seed']}"
            axes.text(LABELS, y, text, va="center", fontsize=9)
        model, images = STAGES[name].beside or ("", "")
        theirs = paper[model][images]
        axes.plot([theirs] * 2, [line - 0.4, line + 0.4], color=style.PAPER, lw=2.5)
        words = {"ha": "center", "va": "bottom", "fontsize": 9}
        axes.text(theirs, line - 0.42, f"the paper's {theirs:.1f}", **words)
        size = runs[0]["size"]
        if yardsticks is not None and str(size) in yardsticks["accuracies"]:
            guess = best_guess(yardsticks, size)
            axes.plot([guess] * 2, [line - 0.4, line + 0.4], ":", color="black", lw=2)
            axes.text(guess, line - 0.42, f"from the ends alone {guess:.1f}", **words)
    titles = [STAGES[name].title.replace(", ", "\n") for name in stages]
    axes.set_yticks(range(len(stages)), titles)
    axes.set(xlim=(CHANCE, 100), ylim=(len(stages) - 0.5, -0.75))
    axes.set_xlabel("test accuracy, %, with 95% interval; chance is 50%")
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["right", "top"]].set_visible(False)
    return figure


command.main(lambda args: redraw(args.result))
