"""The paper's Table 6 beside ours: accuracy on Path-X and Path-256, in JSON, Markdown, a picture.

python -m experiments.pathx.report docs/results/pathx.json    # Markdown and picture anew
"""

from experiments.reports import result_file

FILE = result_file(__name__, __doc__, __spec__)  # before PyTorch is loaded, which takes seconds

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.command_line import errors_as_sentences
from data.lra.store import open_split
from evaluation.markdown import digits
from evaluation.results import Row, add_runs, read_result, write_result
from evaluation.statistics import wilson
from evaluation.style import styles_of
from experiments.classifier_runs import describe, finished_folders, read_run_config
from experiments.pathx.stages import DENSE, SPARSE, STAGES
from experiments.reports import mean_text, publish, table
from training.metrics import read_metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Result = dict[str, Any]

PAPER = [
    {"model": DENSE, "pathx": 61.4, "path256": None},
    {"model": SPARSE, "pathx": 56.0, "path256": 63.1},
]
"""arXiv 2205.14135, Table 6: test accuracy in percent; None: at chance or out of memory, as were
all other models there."""

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
    yardsticks = path.parent / "pathfinder_yardsticks.json"
    if yardsticks.exists():
        parts.append("## What can be had without following a contour\n")
        parts.append(yardsticks_table(read_result(yardsticks, "accuracies")))
    publish(path, "\n".join(parts), draw(result))


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


def _last_devices(starts: list[Row]) -> str:
    """The GPUs of the newest start; how many was not noted in the first runs."""
    if not starts:
        return "-"
    n, device = starts[-1].get("world_size", 1), starts[-1]["device"]
    return device if n == 1 else f"{n} x {device}"


def draw(result: Result) -> "Figure":
    """Validation accuracy over the images seen in all stages so far, a line a stage and seed."""
    # matplotlib takes a second to load, which --help should not wait for
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    styles = styles_of(STAGES)
    runs = {f"{run['stage']}_seed{run['seed']}": run for run in result["runs"]}
    lines = {}
    for run in runs.values():
        first, curve = images_before(run, runs), run["curve"]
        look: dict[str, Any] = {**styles[run["stage"]], "marker": "", "lw": 1.4}
        millions = [(first + n) / 1e6 for n in curve["examples"]]
        (lines[STAGES[run["stage"]].title],) = axes.plot(millions, curve["val_accuracy"], **look)
    axes.axhline(50, color="#888888", lw=0.8)
    for row in result["paper"]:
        axes.axhline(row["pathx"], color="#888888", ls=":", lw=1)
        name, right = f"{row['model']} on Path-X, the paper's", axes.get_yaxis_transform()
        above = {"transform": right, "ha": "right", "va": "bottom"}
        axes.text(1, row["pathx"], name, **above, fontsize=8, color="#888888")
    axes.set_xlabel("training images seen, millions, with those of the stages before")
    axes.set_ylabel("validation accuracy, %")
    axes.grid(alpha=0.3)
    figure.legend(lines.values(), lines, fontsize=9, loc="outside upper center", ncols=3)
    return figure


def images_before(run: Row, runs: Mapping[str, Row]) -> int:
    """Images seen in the stages that a run begins with, as far as they are among `runs`."""
    before = runs.get(run["begins_with"] or "")
    return 0 if before is None else before["examples"] + images_before(before, runs)


if FILE is not None:
    with errors_as_sentences():
        redraw(FILE)
