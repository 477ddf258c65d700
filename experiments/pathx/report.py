"""Table 6 of the paper and ours: accuracy on Path-X and Path-256, as JSON, Markdown, picture.

python -m experiments.pathx.report docs/results/pathx.json    # rewrite Markdown and picture
"""

from evaluation.markdown import dict_table
from experiments.reports import report_command

command = report_command(__name__)  # before PyTorch is imported, which takes seconds

import re
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from data.lra.store import open_split
from evaluation.markdown import digits
from evaluation.results import Row, read_result, write_result
from evaluation.statistics import wilson
from experiments import style
from experiments.classifier_runs import (
    describe,
    display_description,
    finished_folders,
    read_run_config,
)
from experiments.harness import Result
from experiments.pathx.stages import DENSE, SPARSE, STAGES
from experiments.reports import mean_text, publish
from experiments.results import add_runs
from training.metrics import read_metrics

PAPER = [
    {"model": DENSE, "pathx": 61.4, "path256": None},
    {"model": SPARSE, "pathx": 56.0, "path256": 63.1},
]
"""arXiv 2205.14135, Table 6: test accuracy in percent. None: at chance or out of memory, as all
other models there."""

CHANCE = 50  # percent
LABELS = 66  # x of the labels on the bars, percent; no other line is there
BASELINE_SIZES = {"64": "Path-64", "128": "Path-X", "256": "Path-256"}
_NAME = re.compile(rf"({'|'.join(STAGES)})_seed\d+")


def write_report(out: Path, results: Path, others: Sequence[Path] = ()) -> None:
    """Write pathx.json into `results`, on all finished stages in `out`, and print the tables.

    Runs of the reports `others` are added if `out` has no run of their name.

    Raises:
        ValueError: no stage is finished.
    """
    own_runs = [describe_run(f) for f in finished_folders(out) if _NAME.fullmatch(f.name)]
    runs = add_runs(own_runs, others, lambda run: (list(STAGES).index(run["stage"]), run["seed"]))
    if not runs:
        raise ValueError(f"{out} has no finished stage to report on")
    path = results / "pathx.json"
    write_result(path, {"unit": "percent", "paper": PAPER, "runs": runs})
    redraw(path)


def redraw(path: Path) -> None:
    """Rewrite the Markdown and the picture next to the JSON, and print the tables.

    Adds the baselines that do not follow a contour, if experiments.contours.baselines has written
    its result next to the JSON.
    """
    result = read_result(path, "paper", "runs")
    parts = [
        "# Path-X and Path-256, Table 6 of the FlashAttention paper\n",
        "Test accuracy in percent. docs/lra.md explains the columns.\n",
        accuracy_table(result),
        "## Cost of each run\n",
        runs_table(result),
    ]
    baselines, baselines_path = None, path.parent / "pathfinder_baselines.json"
    if baselines_path.exists():
        baselines = read_result(baselines_path, "accuracies")
        parts.append("## Baselines that do not follow a contour\n")
        parts.append(baselines_table(baselines))
    publish(path, "\n".join(parts), draw(result, baselines))


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
    """Accuracy of each stage and seed, with the paper's accuracy."""
    paper: dict[str, Row] = {row["model"]: row for row in result["paper"]}
    published = {
        name: paper[x.reference[0]][x.reference[1]] for name, x in STAGES.items() if x.reference
    }
    return dict_table(
        {
            "model": STAGES[run["stage"]].title,
            "seed": str(run["seed"]),
            "tokens": f"{run['tokens']:,}",
            "black pixels": "removed" if "left out" in run["padding"] else "tokens",
            "test accuracy": mean_text(run["test_accuracy"], run["test_interval"]),
            "paper": digits(published.get(run["stage"]), ".1f"),
        }
        for run in result["runs"]
    )


def runs_table(result: Result) -> str:
    """Steps, images and minutes of each stage and seed."""
    return dict_table(
        {
            "stage": STAGES[run["stage"]].title,
            "seed": str(run["seed"]),
            "attention": run["attention"],
            "positions": display_description(run["positions"]),
            "parameters": f"{run['parameters']:,}",
            "steps": f"{run['steps']:,}",
            "images seen": f"{run['examples']:,}",
            "images in the datasets": f"{run['examples_in_sets']:,}",
            "GPU-minutes of training": f"{run['minutes']:.1f}",
            "wall minutes": digits(run["wall_minutes"], ".1f"),
            "last device": _last_devices(run["starts"]),
        }
        for run in result["runs"]
    )


def baselines_table(result: Result) -> str:
    """Accuracy in percent of baselines that see the markers only, from contours.baselines."""
    by_size = result["accuracies"]
    by_title = {title: by_size[n] for n, title in BASELINE_SIZES.items() if n in by_size}
    return dict_table(
        {
            "baseline sees": name,
            **{title: f"{100 * x[name]:.1f}" for title, x in by_title.items() if name in x},
        }
        for name in dict.fromkeys(name for x in by_title.values() for name in x)
    )


def best_guess(baselines: Result, size: int) -> float:
    """Accuracy in percent of the best baseline that sees the markers of `size`-pixel images."""
    return 100 * max(baselines["accuracies"][str(size)].values())


def _last_devices(starts: list[Row]) -> str:
    """GPUs of the latest start; the first runs did not record their number."""
    if not starts:
        return "-"
    n, device = starts[-1].get("world_size", 1), starts[-1]["device"]
    return device if n == 1 else f"{n} x {device}"


def draw(result: Result, baselines: Result | None = None) -> Figure:
    """Draw the test accuracy of each stage that the paper also has: a bar per seed, from chance on.

    A dotted line is the best baseline that sees the markers only, if `baselines` has that size.
    """
    stages: dict[str, list[Row]] = {}
    for run in result["runs"]:
        if STAGES[run["stage"]].reference:
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
        model, images = STAGES[name].reference or ("", "")
        theirs = paper[model][images]
        axes.plot([theirs] * 2, [line - 0.4, line + 0.4], color=style.PAPER, lw=2.5)
        words = {"ha": "center", "va": "bottom", "fontsize": 9}
        axes.text(theirs, line - 0.42, f"paper: {theirs:.1f}", **words)
        size = runs[0]["size"]
        if baselines is not None and str(size) in baselines["accuracies"]:
            guess = best_guess(baselines, size)
            axes.plot([guess] * 2, [line - 0.4, line + 0.4], ":", color="black", lw=2)
            axes.text(guess, line - 0.42, f"endpoints alone: {guess:.1f}", **words)
    titles = [STAGES[name].title.replace(", ", "\n") for name in stages]
    axes.set_yticks(range(len(stages)), titles)
    axes.set(xlim=(CHANCE, 100), ylim=(len(stages) - 0.5, -0.75))
    axes.set_xlabel("test accuracy, %, with 95% interval; chance is 50%")
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["right", "top"]].set_visible(False)
    return figure


command.main(lambda args: redraw(args.result))
